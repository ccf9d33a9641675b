// This browser's requests: a card for each, followed until it has ended.
// The browser remembers ids only; everything shown is read from the service.

const FOLLOW_EVERY_MS = 400;
const RETRY_EVERY_MS = 3000;
const KEPT = 50;
const STORED = "diffusion-requests";
const SMALL = 256;
const WATCHED_AT_ONCE = 2;
const ENDED = new Set(["succeeded", "failed", "canceled", "expired"]);

const list = document.getElementById("requests");
const cards = new Map();
const watching = new Map();
let onReuse = () => {};
let following = false;

// --- calls ------------------------------------------------------------------

// Never throws: {ok, status, body} or {ok: false, status, message, details}.
export async function call(method, path, body, headers = {}) {
  const options = { method, headers: { ...headers } };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  for (let triesLeft = 1; ; triesLeft -= 1) {
    try {
      const response = await fetch(path, options);
      const answer = response.status === 204 ? null : await response.json();
      if (response.ok) return { ok: true, status: response.status, body: answer };
      const error = answer.error;
      return { ok: false, status: response.status, message: error.message, details: error.details ?? [] };
    } catch {
      if (triesLeft > 0) continue;
      return { ok: false, status: 0, message: "The service does not answer. Trying again.", details: [] };
    }
  }
}

// --- the list ---------------------------------------------------------------

export function startRequests(options) {
  onReuse = options.onReuse;
  for (const id of JSON.parse(localStorage.getItem(STORED) ?? "[]")) {
    cards.set(id, { request: null, element: null });
  }
  follow();
}

export function showRequest(request, { first = false } = {}) {
  let card = cards.get(request.id);
  if (!card) {
    card = { request: null, element: null };
    cards.set(request.id, card);
  }
  if (!card.element) {
    card.element = newElement(request.id);
    if (first) list.prepend(card.element);
    else list.append(card.element);
  }
  card.request = request;
  fill(card.element, request);
  watch(card.element, request);
  remember();
  follow();
}

function forget(id) {
  unwatch(id);
  cards.get(id)?.element?.remove();
  cards.delete(id);
  remember();
}

function remember() {
  const newestFirst = Array.from(cards, ([id, card]) => [id, card.request?.created_at ?? 0])
    .sort(([, one], [, other]) => other - one)
    .map(([id]) => id);
  localStorage.setItem(STORED, JSON.stringify(newestFirst.slice(0, KEPT)));
  document.getElementById("empty").hidden = cards.size > 0;
}

// One loop for all cards, alive only while one of them has not ended.
async function follow() {
  if (following) return;
  following = true;
  let pending = unfinished();
  while (pending.length) {
    let answered = true;
    for (const id of pending) {
      answered = (await refresh(id)) && answered;
    }
    pending = unfinished();
    if (pending.length) await pause(answered && !document.hidden ? FOLLOW_EVERY_MS : RETRY_EVERY_MS);
  }
  following = false;
}

function unfinished() {
  return Array.from(cards.keys()).filter((id) => !ENDED.has(cards.get(id).request?.status));
}

async function refresh(id) {
  const answer = await call("GET", `v1/requests/${encodeURIComponent(id)}`);
  if (answer.ok) showRequest(answer.body);
  else if (answer.status === 404) forget(id);
  else say(id, answer.message);
  return answer.ok;
}

function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

function say(id, message) {
  const element = cards.get(id)?.element;
  if (element) element.querySelector(".status").textContent = message;
}

// --- previews ---------------------------------------------------------------

// Browsers open six connections to one host, so a few cards may follow events; the others only poll.
function watch(element, request) {
  const wanted = request.status === "running" && request.parameters.preview;
  const watched = watching.has(request.id);
  if (wanted && !watched && watching.size < WATCHED_AT_ONCE) {
    const source = new EventSource(`${request.urls.events.slice(1)}`);
    source.addEventListener("preview", (event) => {
      const image = element.querySelector(".preview");
      image.src = JSON.parse(event.data).image;
      image.hidden = false;
    });
    watching.set(request.id, source);
  } else if (!wanted && watched) {
    unwatch(request.id);
  }
  if (ENDED.has(request.status)) element.querySelector(".preview").hidden = true;
}

function unwatch(id) {
  watching.get(id)?.close();
  watching.delete(id);
}

// --- one card ---------------------------------------------------------------

function newElement(id) {
  const element = document.getElementById("request").content.firstElementChild.cloneNode(true);
  element.dataset.id = id;
  element.querySelector(".cancel").addEventListener("click", () => cancel(id));
  element.querySelector(".remove").addEventListener("click", () => remove(id));
  element.querySelector(".reuse").addEventListener("click", () => {
    const { request } = cards.get(id);
    onReuse({ ...request.parameters, model: request.model, priority: request.priority });
  });
  return element;
}

async function cancel(id) {
  const answer = await call("POST", `v1/requests/${encodeURIComponent(id)}/cancel`);
  if (answer.ok) showRequest(answer.body);
  if (answer.status === 202) say(id, "Stopping after this step.");
  if (!answer.ok) say(id, answer.message);
}

async function remove(id) {
  const answer = await call("DELETE", `v1/requests/${encodeURIComponent(id)}`);
  if (answer.ok || answer.status === 404) forget(id);
  else say(id, answer.message);
}

function fill(element, request) {
  const ended = ENDED.has(request.status);
  element.dataset.status = request.status;
  write(element.querySelector(".prompt"), request.parameters.prompt);
  write(element.querySelector(".status"), statusText(request));
  write(element.querySelector(".settings"), settingsText(request));
  const progress = element.querySelector("progress");
  progress.value = request.progress.fraction;
  progress.hidden = ended;
  const error = element.querySelector(".error");
  error.hidden = !request.error;
  write(error, request.error?.message ?? "");
  element.querySelector(".warnings").replaceChildren(...request.warnings.map(warning));
  element.querySelector(".cancel").hidden = ended;
  element.querySelector(".remove").hidden = !ended;
  const outputs = element.querySelector(".outputs");
  if (outputs.childElementCount !== request.outputs.length) {
    outputs.replaceChildren(...request.outputs.map((output) => figure(request, output)));
  }
  const inputs = element.querySelector(".inputs");
  if (!inputs.childElementCount) inputs.append(...inputsOf(request.parameters).map(inputImage));
}

// Only what changed is written, so that a screen reader is not told the same again and again.
function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function warning(text) {
  const item = document.createElement("li");
  item.textContent = text;
  return item;
}

function figure(request, output) {
  const element = document.getElementById("output").content.firstElementChild.cloneNode(true);
  const video = output.media_type.startsWith("video/");
  const shown = element.querySelector(video ? "video" : "img");
  if (video) shown.setAttribute("aria-label", request.parameters.prompt);
  else shown.alt = request.parameters.prompt;
  shown.width = output.width;
  shown.height = output.height;
  shown.classList.toggle("small", output.width < SMALL);
  // The path begins with a slash; the page may be served below another one.
  shown.src = output.url.slice(1);
  shown.hidden = false;
  element.querySelector(video ? "img" : "video").remove();
  element.querySelector(".seed").textContent = `seed ${output.seed}`;
  const link = element.querySelector("a");
  link.href = shown.src;
  link.download = `${request.model.split("/").pop()}-${output.seed}.${output.media_type.split("/").pop()}`;
  return element;
}

function inputsOf({ image, mask_image: mask }) {
  return [...image.map((path) => [path, "Image"]), ...(mask ? [[mask, "Mask"]] : [])];
}

function inputImage([path, name]) {
  const image = new Image();
  image.alt = name;
  image.title = name;
  image.src = path.slice(1);
  return image;
}

function statusText(request) {
  const { status, progress, queue_position: place, replica } = request;
  const total = seconds(request.timings.total_s);
  switch (status) {
    case "queued":
      if (place === null) return "Waiting";
      return place === 1 ? `Waiting, next on ${replica}` : `Waiting, place ${place} on ${replica}`;
    case "running": {
      if (!progress.step) return `Running on ${replica}`;
      const left = progress.eta_s === null ? "" : `, about ${seconds(progress.eta_s)} left`;
      return `Step ${progress.step} of ${progress.steps} on ${replica}${left}`;
    }
    case "succeeded":
      return `Done in ${total} by ${replica}`;
    case "failed":
      return `Failed after ${total} on ${replica}`;
    case "expired":
      return "Did not start in time";
    default:
      return "Canceled";
  }
}

function settingsText({ parameters, priority }) {
  const parts = [
    `${parameters.width} × ${parameters.height}`,
    parameters.num_frames === null ? "" : `${parameters.num_frames} frames, ${parameters.fps} a second`,
    `${parameters.num_inference_steps} steps`,
    parameters.strength === null ? "" : `strength ${parameters.strength}`,
    parameters.guidance_scale === null ? "" : `guidance ${parameters.guidance_scale}`,
    ...parameters.lora.map(({ name, scale }) => `${name} ${scale}`),
    `seed ${parameters.seed}`,
    priority === "normal" ? "" : `${priority} priority`,
  ];
  return parts.filter(Boolean).join(" · ");
}

function seconds(value) {
  if (value === null) return "unknown time";
  return value < 10 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}
