// The server's routes, with the key of this tab; errors in words.

import { store, stored } from "./dom.js";

export class ApiError extends Error {
  constructor(message, { status = 0, code = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let key = stored("key") ?? "";
const listeners = new Set();

export const hasKey = () => key !== "";

export function setKey(value) {
  key = value;
  store("key", value || null);
}

/** Told when the server asks for a key, or for another one. */
export function onKeyWanted(listener) {
  listeners.add(listener);
}

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can't be reached. It may have stopped, or the network is down.", { code: "gone" });
  }
  if (response.ok || options.any) return response;
  const error = await asError(response);
  if (response.status === 401) for (const listener of listeners) listener();
  throw error;
}

async function asError(response) {
  let message = "";
  let code = "";
  try {
    const body = await response.json();
    message = body.error?.message ?? "";
    code = body.error?.code ?? "";
  } catch {
    // Not of this server's making, perhaps of a proxy's.
  }
  const words = {
    401: key ? "The server did not accept this API key." : "This server needs an API key.",
    404: "This server has no such route; it may be older than this page. Reload the page.",
    413: "The request is too large for the server.",
    503: "The server is not ready.",
  };
  const sentence = response.status === 401 ? words[401] : message || words[response.status];
  return new ApiError(asSentence(sentence || `The server answered with status ${response.status}.`), {
    status: response.status,
    code,
  });
}

function asSentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

export async function getJson(path, options) {
  return (await send(path, options)).json();
}

export async function getText(path) {
  return (await send(path)).text();
}

/** The state of the server, which needs no key: loading, ready, stalled, draining, failed, or gone. */
export async function state() {
  try {
    return (await (await send("/health/ready", { any: true })).json()).status ?? "gone";
  } catch {
    return "gone";
  }
}

/** Each event's JSON of a streamed answer. An error within the stream is thrown as one before it would be. */
export async function* stream(path, body, signal) {
  const response = await send(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError("The connection broke before the answer was complete.", { code: "cut" });
    buffered += value;
    const events = buffered.split("\n\n");
    buffered = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(asSentence(parsed.error.message), { code: parsed.error.code ?? "" });
      yield parsed;
    }
  }
}
