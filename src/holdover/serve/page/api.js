// Requests to the server; does not depend on the page.

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.param = error?.param ?? null;
  }
}

export const key = {
  get: () => sessionStorage.getItem("holdover-key") ?? "",
  set: (value) => sessionStorage.setItem("holdover-key", value),
};

async function ask(path, options = {}) {
  const headers = options.body instanceof FormData ? {} : { "content-type": "application/json" };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new ApiError(response.status, body.error);
  }
  return response;
}

export const get = async (path) => (await ask(path)).json();

export const compare = async (a, b) =>
  (await ask("/v1/images/compare", { method: "POST", body: JSON.stringify({ a, b }) })).json();

/** Generates one image; `onPartial` gets each preview. Resolves to the event of the finished image. */
export async function generate(request, signal, onPartial) {
  const body = JSON.stringify({ ...request, stream: true });
  const response = await ask("/v1/images/generations", { method: "POST", body, signal });
  for await (const event of events(response.body)) {
    if (event.error) throw new ApiError(400, event.error);
    if (event.type === "image_generation.completed") return event;
    onPartial(event);
  }
  throw new ApiError(0, { message: "The stream ended before the image was finished." });
}

/** Generates a video with and without a cache; `onProgress` gets its record. Resolves to the finished record. */
export async function generateVideo(request, image, signal, onProgress) {
  const form = new FormData();
  for (const [name, value] of Object.entries(request)) form.set(name, typeof value === "string" ? value : JSON.stringify(value));
  if (image) form.set("input_reference", image);
  const { id } = await (await ask("/v1/videos", { method: "POST", body: form })).json();
  for (;;) {
    if (signal.aborted) {
      await ask(`/v1/videos/${id}`, { method: "DELETE" }).catch(() => {}); // it has finished, or the server is gone
      signal.throwIfAborted();
    }
    const video = await get(`/v1/videos/${id}`);
    onProgress(video);
    if (video.status === "completed") return video;
    if (video.status === "failed") throw new ApiError(400, video.error);
    await new Promise((resolve) => setTimeout(resolve, 250));
  }
}

/** The file of a video as an address for a player; a player's own requests would have no key. */
export const videoFile = async (id, variant) => URL.createObjectURL(await (await ask(`/v1/videos/${id}/content?variant=${variant}`)).blob());

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
      if (data) yield JSON.parse(data);
    }
  }
}
