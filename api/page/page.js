// The page: the form, the strip of replicas, and what the models allow.
// The requests below the form are in requests.js.

import { call } from "./calls.js";
import { followImage, readInputs, reuseInputs, showFields, startInputs } from "./inputs.js";
import { showRequest, startRequests } from "./requests.js";

const REPLICAS_EVERY_MS = 2000;
const NUMBERS = ["width", "height", "num_inference_steps", "guidance_scale", "num_outputs_per_prompt", "num_frames", "fps"];
const NUMERALS = [...NUMBERS, "seed", "strength"];

const form = document.getElementById("form");
const formError = document.getElementById("form-error");
const notice = document.getElementById("notice");
let models = [];
let loading = false;

// --- models -----------------------------------------------------------------

// One at a time: a second answer would write the defaults over what was typed meanwhile.
async function loadModels() {
  if (loading) return;
  loading = true;
  const answer = await call("GET", "v1/models");
  loading = false;
  if (!answer.ok) return;
  models = answer.body.data;
  const select = form.elements.model;
  select.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  document.getElementById("model").hidden = models.length < 2;
  showDefaults();
}

function chosenModel() {
  return models.find((one) => one.id === form.elements.model.value);
}

function showDefaults() {
  const model = chosenModel();
  if (!model) return;
  showFields(model.takes);
  for (const name of NUMBERS) {
    const value = model.defaults[name];
    if (value !== undefined && value !== null) form.elements[name].value = value;
  }
  for (const name of ["width", "height"]) {
    form.elements[name].step = model.size_multiple;
    form.elements[name].min = model.size_multiple;
  }
  form.elements.num_frames.step = model.frames_step ?? 1;
  form.elements.image.multiple = model.limits.images > 1;
  form.elements.lora.replaceChildren(new Option("none", ""), ...model.loras.map((name) => new Option(name, name)));
  for (const label of form.querySelectorAll("[data-adapters]")) label.hidden = !model.loras.length;
  followImage(model.defaults);
}

// --- replicas ---------------------------------------------------------------

async function showReplicas() {
  if (document.hidden) return;
  const answer = await call("GET", "v1/replicas");
  if (!answer.ok) {
    notice.textContent = answer.message;
    return;
  }
  const replicas = answer.body.data.filter((replica) => replica.state !== "gone");
  document.getElementById("replicas").replaceChildren(...replicas.map(replicaItem));
  const ready = replicas.some((replica) => replica.state === "ready");
  notice.textContent = ready ? "" : "No replica is ready yet; a model may still be loading.";
  if (ready && !models.length) await loadModels();
}

function replicaItem(replica) {
  const item = document.createElement("li");
  const state = document.createElement("span");
  state.className = "state";
  state.textContent = replica.state;
  const work = replica.activity ?? `${replica.running} running, ${replica.waiting} waiting`;
  item.append(`${replica.name} `, state, ` · ${work}`);
  item.dataset.state = replica.state;
  item.title = replica.error ?? `${replica.model} on ${replica.device_kind} ${replica.devices.join(", ")}`;
  return item;
}

// --- the form ---------------------------------------------------------------

async function body() {
  const given = await readInputs();
  for (const [name, value] of new FormData(form)) {
    if (value instanceof File) continue;
    const text = value.trim();
    if (text === "" || form.elements[name].closest("[hidden]")) continue;
    if (form.elements[name].type === "checkbox") {
      given[name] = true;
      continue;
    }
    given[name] = NUMERALS.includes(name) ? numeral(text) : text;
  }
  const { lora, lora_scale: scale = "1", ...others } = given;
  return lora ? { ...others, lora: { name: lora, scale: numeral(scale) } } : others;
}

// JSON holds any whole number, JavaScript does not: a long seed is sent digit by digit.
function numeral(text) {
  return /^-?\d+(\.\d+)?$/.test(text) ? JSON.rawJSON?.(text) ?? Number(text) : text;
}

async function submit(event) {
  event.preventDefault();
  const unreadable = Array.from(form.elements).filter((field) => field.validity?.badInput);
  showErrors("", unreadable.map(({ name }) => ({ param: name, message: "is not a number" })));
  if (unreadable.length) return;
  const button = form.querySelector("button[type=submit]");
  button.disabled = true;
  // The key lets the call be sent again after a broken connection without submitting twice.
  const answer = await call("POST", "v1/requests", await body(), { "Idempotency-Key": randomKey() });
  button.disabled = false;
  if (answer.ok) showRequest(answer.body, { first: true });
  else showErrors(answer.message, answer.details);
}

function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (word) => word.toString(16)).join("");
}

function showErrors(message, details) {
  const wrong = new Map(details.map((detail) => [detail.param, detail.message]));
  for (const field of form.elements) {
    if (field.name) field.setAttribute("aria-invalid", wrong.has(field.name));
  }
  formError.textContent = details.length
    ? details.map((detail) => `${labelOf(detail.param)}: ${detail.message}`).join("\n")
    : message;
  form.querySelector("[aria-invalid=true]")?.focus();
}

function labelOf(name) {
  return form.elements[name]?.closest("label")?.firstChild.textContent.trim() ?? name;
}

async function reuse(parameters) {
  await reuseInputs(parameters);
  for (const field of form.elements) {
    if (!(field.name in parameters) || field.type === "file" || field.name === "lora") continue;
    if (field.type === "checkbox") field.checked = parameters[field.name];
    else field.value = parameters[field.name] ?? "";
  }
  const [adapter] = parameters.lora;
  form.elements.lora.value = adapter?.name ?? "";
  form.elements.lora_scale.value = adapter?.scale ?? 1;
  form.elements.prompt.focus();
}

form.addEventListener("submit", submit);
form.elements.model.addEventListener("change", showDefaults);
form.elements.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

startInputs(() => followImage(chosenModel()?.defaults ?? {}));
startRequests({ onReuse: reuse });
loadModels();
showReplicas();
setInterval(showReplicas, REPLICAS_EVERY_MS);
document.addEventListener("visibilitychange", showReplicas);
