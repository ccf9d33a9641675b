// One request as its card shows it.

const SMALL = 256;
const ENDED = new Set(["succeeded", "failed", "canceled", "expired"]);

// Also false where nothing is known of the request yet.
export function hasEnded(request) {
  return ENDED.has(request?.status);
}

export function fillCard(element, request) {
  const ended = hasEnded(request);
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
      if (place === null) return "Queued";
      return place === 1 ? `Queued, next on ${replica}` : `Queued, position ${place} on ${replica}`;
    case "running": {
      if (!progress.step) return `Running on ${replica}`;
      const left = progress.eta_s === null ? "" : `, about ${seconds(progress.eta_s)} left`;
      return `Step ${progress.step} of ${progress.steps} on ${replica}${left}`;
    }
    case "succeeded":
      return `Finished in ${total} on ${replica}`;
    case "failed":
      return `Failed after ${total} on ${replica}`;
    case "expired":
      return "Expired: it did not start in time";
    default:
      return "Canceled";
  }
}

function settingsText({ parameters, priority }) {
  const parts = [
    `${parameters.width} × ${parameters.height}`,
    parameters.num_frames === null ? "" : `${parameters.num_frames} frames, ${parameters.fps} per second`,
    `${parameters.num_inference_steps} steps`,
    parameters.strength === null ? "" : `strength ${parameters.strength}`,
    parameters.guidance_scale === null ? "" : `guidance scale ${parameters.guidance_scale}`,
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
