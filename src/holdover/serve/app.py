"""The HTTP side: paths, and what answers them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from .. import __version__
from . import refusals
from .asked import Asked, size_name
from .assets import page_file
from .choice import described
from .compare import compared
from .drawing import Delivery, Stream, made, picture, together, usage
from .errors import ApiError
from .front import Front
from .metrics import CONTENT_TYPE, RequestMetrics
from .openapi import PICTURES, describe
from .openapi import refusals as answers
from .schemas import (
    CacheInfo,
    CompareRequest,
    Comparison,
    ImageRequest,
    ImagesResponse,
    Limits,
    MethodInfo,
    MethodTotals,
    Model,
    ModelList,
    Status,
)
from .settings import Settings
from .studio import Studio
from .worker import Worker

router = APIRouter()


def create_app(settings: Settings | None = None, api_keys: Sequence[str] = (), studio: Studio | None = None) -> FastAPI:
    """A server as an ASGI application: it loads its model when it starts, and draws what waits before it ends.

    Pictures are drawn by a worker of its own, unless `studio` is somebody else.
    """
    settings = settings or Settings()
    drawing: Studio = Worker(settings) if studio is None else studio
    metrics = RequestMetrics(drawing.__len__)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await drawing.start()
        yield
        await drawing.stop()

    app = FastAPI(title="holdover", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.studio, app.state.settings, app.state.metrics = drawing, settings, metrics
    app.state.started = int(time.time())
    app.openapi = lambda: describe(app, settings, _method(drawing, settings))  # type: ignore[method-assign]
    app.include_router(router)
    refusals.install(app)
    proxied = studio is not None
    app.add_middleware(Front, metrics=metrics, keys=api_keys, max_body=settings.max_body, proxied=proxied)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origin, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app


def _method(studio: Studio, settings: Settings) -> str:
    """The method of requests that ask for none; what was asked for while the model is loading."""
    try:
        return studio.loaded()[1].method
    except ApiError:
        return settings.cache_backend


@router.post(
    "/v1/images/generations",
    tags=["images"],
    response_model=ImagesResponse,
    responses=PICTURES | answers(400, 401, 404, 413, 429, 499, 503),
)
async def generate(body: ImageRequest, request: Request) -> Any:
    """Draw pictures; with `stream`, show one as it forms."""
    state = request.app.state
    facts, standing = state.studio.loaded()
    asked = await asyncio.to_thread(Asked, body, facts, state.settings, standing)
    deliveries = [Delivery() for _ in range(asked.count)]
    tickets = [asked.ticket(i, delivery, request.state.request_id) for i, delivery in enumerate(deliveries)]
    state.studio.put(tickets)
    if body.stream:
        return Stream(asked, tickets[0], deliveries[0])
    finished = await together(request, tickets, deliveries)
    as_url = body.response_format == "url"
    return ImagesResponse(
        created=int(time.time()),
        data=[await picture(asked, one, as_url) for one in finished],
        size=asked.size_name,
        usage=usage([one.record for one in finished]),
    )


@router.post("/v1/images/compare", tags=["images"], response_model=Comparison, responses=answers(400, 401, 413))
async def compare(body: CompareRequest, request: Request) -> Comparison:
    """How far two pictures of one size are apart, in the eight bits they were sent with."""
    return await asyncio.to_thread(compared, body.a, body.b, request.app.state.settings.max_size)


@router.get("/v1/models", tags=["models"], response_model=ModelList, responses=answers(401, 503))
async def models(request: Request) -> ModelList:
    """The model that is served, with what a client needs to ask well."""
    return ModelList(data=[_model(request)])


@router.get("/v1/models/{model:path}", tags=["models"], response_model=Model, responses=answers(401, 404, 503))
async def model(model: str, request: Request) -> Model:
    """One model."""
    found = _model(request)
    if model != found.id:
        raise ApiError(404, f"There is no model {model!r}. This server has {found.id!r}.", "model_not_found", "model")
    return found


def _model(request: Request) -> Model:
    state = request.app.state
    facts = state.studio.loaded()[0]
    limits = {name: getattr(state.settings, name) for name in Limits.model_fields}
    return Model(
        id=facts.name,
        created=state.started,
        owned_by="holdover",
        pipeline=facts.pipeline,
        transformer=facts.transformer,
        size=size_name(facts.size),
        steps=facts.steps,
        styles=facts.styles,
        partial_images=facts.partial_images,
        limits=Limits(**limits),
    )


@router.get("/v1/cache", tags=["cache"], response_model=CacheInfo, responses=answers(401, 503))
async def cache(request: Request) -> CacheInfo:
    """The cache: how the server stands, what it has done, which methods and settings a request may ask for."""
    studio: Studio = request.app.state.studio
    _, standing = studio.loaded()
    report, known = await studio.report(), await asyncio.to_thread(described)  # the first time it imports them all
    return CacheInfo(
        **standing.as_dict(),
        notes=list(report.notes),
        totals={method: MethodTotals(**asdict(totals)) for method, totals in report.totals.items()},
        last=None if report.last is None else made(report.last),
        **asdict(report.known),
        prompt_cache=None if report.prompts is None else dict(zip(("hits", "misses"), report.prompts, strict=True)),
        methods=[MethodInfo.model_validate(method) for method in known],
    )


@router.get("/health", tags=["server"], response_model=Status, responses=answers())
async def health() -> Status:
    """Whether the process answers."""
    return Status(status="ok")


@router.get("/ready", tags=["server"], response_model=Status, responses=answers(503))
async def ready(request: Request) -> Status:
    """Whether the model is loaded."""
    request.app.state.studio.loaded()
    return Status(status="ready")


@router.get("/metrics", tags=["server"], response_class=Response, responses=answers(401))
async def metrics(request: Request) -> Response:
    """Counters for Prometheus."""
    state = request.app.state
    return Response(await state.studio.metrics(state.metrics.text()), media_type=CONTENT_TYPE)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page."""
    return page_file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_part(name: str) -> Response:
    """What the page loads."""
    return page_file(name)
