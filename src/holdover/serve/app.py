"""The HTTP application: its paths, and responses from generated images, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from starlette.background import BackgroundTask
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..errors import did_you_mean
from ..metrics import LPIPS_SIDE, SSIM_WINDOW, lpips, psnr, ssim
from . import schemas
from .errors import EXCEPTION_HANDLERS, ApiError, error_responses, invalid
from .images import decode_png, encode_image, read_edit, read_video_request
from .metrics import CONTENT_TYPE, RequestMetrics
from .middleware import RequestMiddleware
from .openapi import CONTENT_RESPONSE, EDIT_BODY, IMAGES_RESPONSE, VIDEO_BODY, method_infos, openapi_document
from .queue import Events, GeneratedImage, ImageBackend, Preview, QueueItem, follow
from .settings import Settings
from .validation import check_kind, format_size, ignored_fields, validate, validate_video
from .videos import Variant, VideoJobs

if TYPE_CHECKING:
    from PIL.Image import Image


def check_query(request: Request) -> None:
    """Raise an error for a query parameter that the API does not have on this path."""
    route, path = request.scope["route"], request.scope["route"].path
    known = [parameter.alias for parameter in route.dependant.query_params]
    unknown = next((name for name in request.query_params if name not in known), None)
    if unknown is not None and path.startswith("/v1/"):  # the page reads its own
        hint = did_you_mean(unknown, known) or f" Query parameters: {', '.join(known) or 'none'}."
        raise invalid(f"There is no query parameter {unknown[:100]!r}.{hint}", unknown[:100], "unknown_field")


router = APIRouter(dependencies=[Depends(check_query)])


def create_app(
    settings: Settings | None = None,
    api_keys: Sequence[str] = (),
    backend: ImageBackend | None = None,
    behind_proxy: bool = False,
) -> FastAPI:
    """The server as an ASGI application, which loads its model at startup and empties its queue at shutdown.

    A `Worker` in this process generates the images, unless another backend is given. `behind_proxy`: a proxy sets the
    request id on responses.
    """
    settings = settings or Settings()
    if backend is None:
        from .worker import Worker  # not needed where replicas do the work

        backend = Worker(settings)
    metrics, videos = RequestMetrics(backend.queue_length), VideoJobs(settings, backend)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await backend.start()
        videos.start()
        yield
        await videos.stop(settings.grace)
        await backend.stop()

    documents: dict[str, dict[str, Any]] = {}  # by default method

    def openapi() -> dict[str, Any]:
        try:
            method = backend.loaded()[1].method
        except ApiError:  # the model is loading
            method = settings.cache_backend
        if method not in documents:
            documents[method] = openapi_document(app, settings, method)
        return documents[method]

    app = FastAPI(title="holdover", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.exception_handlers.update(EXCEPTION_HANDLERS)
    app.state.backend, app.state.settings, app.state.metrics = backend, settings, metrics
    app.state.started, app.state.videos = int(time.time()), videos
    app.openapi = openapi  # type: ignore[method-assign]
    app.include_router(router)
    app.add_middleware(RequestMiddleware, metrics=metrics, settings=settings, keys=api_keys, behind_proxy=behind_proxy)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    return app


_IMAGES: dict[str, Any] = {
    "tags": ["images"],
    "response_model": schemas.ImagesResponse,
    "responses": IMAGES_RESPONSE | error_responses(400, 401, 403, 404, 413, 429, 499, 503),
}

_VIDEO_ERRORS = error_responses(400, 401, 403, 404, 413, 429, 503, 507)


@router.post("/v1/images/generations", **_IMAGES)
async def generate(body: schemas.ImageRequest, request: Request) -> Any:
    """Generate images; with `stream`, send previews of one image while it is generated."""
    return await _generate(request, body)


@router.post("/v1/images/edits", **_IMAGES, openapi_extra=EDIT_BODY)
async def edit(request: Request) -> Any:
    """Change an image as the prompt says, if the model takes an image; the fields are those of a generation."""
    check_kind(request.app.state.backend.loaded()[0], video=False)  # also an error while the model is loading
    body, image = await read_edit(request, request.app.state.settings.max_size)
    return await _generate(request, body, image)


async def _generate(request: Request, body: schemas.ImageRequest, image: Image | None = None) -> Any:
    backend: ImageBackend = request.app.state.backend
    model, default_cache = backend.loaded()
    request.state.prompt = body.prompt
    specs = await asyncio.to_thread(
        validate, body, model, request.app.state.settings, default_cache, request.state.request_id, image
    )
    items, notes = [QueueItem(spec) for spec in specs], ignored_fields(body, model, default_cache)
    events = follow(items)
    backend.submit(items)
    if body.stream:
        return EventStream(items[0], events, body, notes)
    images = await _wait_for_all(request, items)
    kind, size = body.output_format or "png", specs[0].output_size
    files = [await asyncio.to_thread(encode_image, one.pixels, size, kind, body.output_compression) for one in images]
    fields = [
        {"url": f"data:image/{kind};base64,{file}"} if body.response_format == "url" else {"b64_json": file}
        for file in files
    ]
    return schemas.ImagesResponse(
        created=int(time.time()),
        data=[schemas.Image(holdover=one.info, **field) for one, field in zip(images, fields, strict=True)],
        size=format_size(size),
        output_format=kind,
        usage=_usage(images),
        notes=notes,
    )


async def _wait_for_all(request: Request, items: Sequence[QueueItem]) -> list[GeneratedImage]:
    """All images of a request; if the client disconnects first, they are cancelled."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    images = asyncio.gather(*(asyncio.wrap_future(item.future) for item in items))
    disconnect = asyncio.create_task(watch())
    either: set[asyncio.Future[Any]] = {images, disconnect}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not images.done():
            raise ApiError(499, "The client disconnected.", "client_closed_request")  # for the log and the metrics
        return images.result()
    finally:
        for item in items:
            item.future.cancel()
        disconnect.cancel()
        # Await what was cancelled: asyncio logs an exception that was never retrieved.
        await asyncio.gather(images, disconnect, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events: previews, then the image or an error; if the client disconnects, the image is cancelled."""

    def __init__(self, item: QueueItem, events: Events, body: schemas.ImageRequest, notes: list[str]) -> None:
        super().__init__(self._events(events), media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._item, self._body, self._notes = item, body, notes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._item.future.cancel()

    async def _events(self, events: Events) -> AsyncIterator[str]:
        previews, spec, kind = 0, self._item.spec, self._body.output_format or "png"
        name = "image_generation" if spec.image is None else "image_edit"
        while True:
            _, event = await events.get()
            if isinstance(event, ApiError):
                yield f"event: error\ndata: {json.dumps(event.body)}\n\n"
                return
            if not isinstance(event, Preview | GeneratedImage):
                continue
            quality = self._body.output_compression
            file = await asyncio.to_thread(encode_image, event.pixels, spec.output_size, kind, quality)
            fields: dict[str, Any] = {"b64_json": file, "size": format_size(spec.output_size), "output_format": kind}
            fields["created_at"] = int(time.time())
            response: schemas.PartialImage | schemas.CompletedImage
            if isinstance(event, Preview):
                fields |= {"partial_image_index": previews, "step": event.step, "steps": spec.run_steps}
                fields |= {"type": f"{name}.partial_image", "trace": event.trace}
                response = schemas.PartialImage(**fields)
                previews += 1
            else:
                fields |= {"usage": _usage([event]), "holdover": event.info, "notes": self._notes}
                fields["type"] = f"{name}.completed"
                response = schemas.CompletedImage(**fields)
            yield f"event: {response.type}\ndata: {response.model_dump_json()}\n\n"
            if isinstance(event, GeneratedImage):
                return


def _usage(images: Sequence[GeneratedImage]) -> schemas.Usage:
    text, image = (sum(one.tokens[i] for one in images) for i in (0, 1))
    details = schemas.TokenDetails(text_tokens=text, image_tokens=0)
    return schemas.Usage(
        input_tokens=text, input_tokens_details=details, output_tokens=image, total_tokens=text + image
    )


@router.post("/v1/images/compare", tags=["images"], responses=error_responses(400, 401, 403, 413, 429))
def compare(body: schemas.CompareRequest, request: Request) -> schemas.Comparison:
    """The difference between two images of the same size, in the eight bits per channel they were sent with."""
    max_size = request.app.state.settings.max_size
    a, b = decode_png("a", body.a, max_size), decode_png("b", body.b, max_size)
    if a.shape != b.shape:
        sizes = " and ".join(f"{image.shape[2]}x{image.shape[1]}" for image in (a, b))
        raise invalid(f"The images have different sizes: {sizes}.", "b")
    decibels = float(psnr(a, b))
    return schemas.Comparison(
        psnr=decibels if math.isfinite(decibels) else None,
        ssim=float(ssim(a, b)) if min(a.shape[1:]) >= SSIM_WINDOW else None,
        lpips=float(lpips(a, b)) if min(a.shape[1:]) >= LPIPS_SIDE else None,
        equal=torch.equal(a, b),
    )


def _videos(request: Request) -> VideoJobs:
    """The jobs; an error while the model is loading, and for a model that generates images."""
    check_kind(request.app.state.backend.loaded()[0], video=True)
    jobs: VideoJobs = request.app.state.videos
    return jobs


@router.post("/v1/videos", tags=["videos"], openapi_extra=VIDEO_BODY, responses=_VIDEO_ERRORS)
async def create_video(request: Request) -> schemas.Video:
    """Put a video in the queue; its id is for the paths below. The request is JSON, or a form with an image."""
    jobs, state = _videos(request), request.app.state
    body, image = await read_video_request(request, state.settings)
    model, default_cache = state.backend.loaded()
    request.state.prompt = body.prompt
    spec = await asyncio.to_thread(
        validate_video, body, model, state.settings, default_cache, request.state.request_id, image
    )
    return await jobs.create(spec, model.name, ignored_fields(body, model, default_cache))


@router.get("/v1/videos", tags=["videos"], responses=_VIDEO_ERRORS)
async def list_videos(
    request: Request,
    after: Annotated[str | None, Query(description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> schemas.VideoList:
    """All videos, by the time they were created."""
    return await asyncio.to_thread(_videos(request).folder.page, after, limit, order == "desc")


@router.get("/v1/videos/{video_id}", tags=["videos"], responses=_VIDEO_ERRORS)
async def get_video(video_id: str, request: Request) -> schemas.Video:
    """A video: how far its job is, and when it is completed, how it was generated."""
    return await asyncio.to_thread(_videos(request).folder.get, video_id)


@router.head("/v1/videos/{video_id}/content", include_in_schema=False)
@router.get(
    "/v1/videos/{video_id}/content",
    tags=["videos"],
    response_class=FileResponse,
    responses=CONTENT_RESPONSE | _VIDEO_ERRORS,
)
async def video_content(video_id: str, request: Request, variant: Variant = "video") -> FileResponse:
    """The MP4 file of a completed video; `plain` is the one without a cache, if the request had `compare`."""
    file = await asyncio.to_thread(_videos(request).folder.open, video_id, variant)
    return FileResponse(
        f"/dev/fd/{file.fileno()}",
        stat_result=os.fstat(file.fileno()),
        media_type="video/mp4",
        filename=Path(file.name).name,
        headers={"cache-control": "private"},
        background=BackgroundTask(file.close),
    )


@router.delete("/v1/videos/{video_id}", tags=["videos"], responses=_VIDEO_ERRORS)
async def delete_video(video_id: str, request: Request) -> schemas.DeletedVideo:
    """Delete a video with its files; one that is not finished is cancelled."""
    await _videos(request).delete(video_id)
    return schemas.DeletedVideo(id=video_id)


@router.get("/v1/models", tags=["models"], responses=error_responses(401, 503))
async def list_models(request: Request) -> schemas.ModelList:
    """The model that is served, with the defaults and limits of requests for it."""
    return schemas.ModelList(data=[_served_model(request)])


@router.get("/v1/models/{model:path}", tags=["models"], responses=error_responses(401, 404, 503))
async def get_model(model: str, request: Request) -> schemas.Model:
    """One model."""
    found = _served_model(request)
    if model != found.id:
        raise ApiError(404, f"There is no model {model!r}. This server has {found.id!r}.", "model_not_found", "model")
    return found


def _served_model(request: Request) -> schemas.Model:
    state = request.app.state
    info, _ = state.backend.loaded()
    return schemas.Model(
        id=info.name,
        created=state.started,
        owned_by="holdover",
        pipeline=info.pipeline,
        transformer=info.transformer,
        size=format_size(info.size),
        square=info.fixed_size,
        size_multiple=info.size_multiple,
        steps=info.steps,
        guidance=info.guidance,
        cfg_scale=info.cfg_scale,
        negative_prompt="negative_prompt" in info.parameters,
        styles=info.styles,
        partial_images=info.partial_images,
        edits=bool(info.edit_parameters),
        video=info.video,
        limits=schemas.Limits(**{name: info.limit(name, state.settings) for name in schemas.Limits.model_fields}),
    )


@router.get("/v1/cache", tags=["cache"], responses=error_responses(401, 503))
async def cache(request: Request) -> schemas.CacheInfo:
    """The default cache, what every method has done, and the methods and settings that a request may have."""
    backend: ImageBackend = request.app.state.backend
    backend.loaded()
    report = await backend.report()
    return schemas.CacheInfo(**dict(report), methods=await asyncio.to_thread(method_infos))  # imports every method


@router.get("/health", tags=["server"], responses=error_responses())
async def health() -> schemas.Status:
    """Whether the process is alive."""
    return schemas.Status(status="ok")


@router.get("/ready", tags=["server"], responses=error_responses(503))
async def ready(request: Request) -> schemas.Status:
    """Whether the model is loaded."""
    request.app.state.backend.loaded()
    return schemas.Status(status="ready")


@router.get("/metrics", tags=["server"], response_class=Response, responses=error_responses(401))
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    state = request.app.state
    return Response(await state.backend.metrics(state.metrics.text()), media_type=CONTENT_TYPE)


_PAGE = Path(__file__).with_name("page")


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """The page."""
    return await page_file("index.html")


@router.get("/docs", include_in_schema=False)
async def docs() -> FileResponse:
    """A page about the API, made from the OpenAPI document."""
    return await page_file("docs.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> FileResponse:
    """A file of the page."""
    if not (_PAGE / name).is_file():
        raise ApiError(404, f"The page has no file {name!r}.", "not_found")
    return FileResponse(_PAGE / name, headers={"cache-control": "no-cache"})
