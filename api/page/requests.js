// This browser's requests: a card for each, followed until it has ended.
// The browser remembers ids only; everything shown is read from the service.

import { call } from "./calls.js";
import { fillCard, hasEnded } from "./card.js";

const FOLLOW_EVERY_MS = 400;
const RETRY_EVERY_MS = 3000;
const KEPT = 50;
const STORED = "diffusion-requests";
const WATCHED_AT_ONCE = 2;

const list = document.getElementById("requests");
const cards = new Map();
const watching = new Map();
let onReuse = () => {};
let following = false;

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
  fillCard(card.element, request);
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
  return Array.from(cards.keys()).filter((id) => !hasEnded(cards.get(id).request));
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
  if (hasEnded(request)) element.querySelector(".preview").hidden = true;
}

function unwatch(id) {
  watching.get(id)?.close();
  watching.delete(id);
}

// --- a card and its buttons --------------------------------------------------

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
