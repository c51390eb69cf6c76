// The page: its views, the key, the theme and the state of the server.

import { getJson, hasKey, onKeyWanted, setKey, state as serverState } from "./api.js";
import { Cache } from "./cache.js";
import { Chat } from "./chat.js";
import { byId, number, store } from "./dom.js";
import { Live } from "./live.js";
import { History } from "./metrics.js";
import { Setup } from "./setup.js";

const STATE_PERIOD_S = 3;
const STATES = {
  connecting: ["Connecting", ""],
  ready: ["Ready", ""],
  loading: ["Loading", "The model is loading. This page goes on by itself when it is there."],
  stalled: ["Stalled", "Requests are running, but the engine has made no step for a while."],
  draining: ["Ending", "The server is shutting down and takes no new requests."],
  failed: ["Failed", "The engine has failed. The server's log says why; start it again."],
  gone: ["Away", "The server can't be reached. This page tries again."],
};

const history = new History();
const chat = new Chat(byId("view-chat"));
const views = {
  chat: { show() {}, hide() {} },
  live: new Live(byId("view-live"), history),
  cache: new Cache(byId("view-cache")),
  setup: new Setup(byId("view-setup")),
};
let current = "";
let known = "";
let needsKey = false;
let info = null;

function go() {
  const wanted = location.hash.slice(1);
  const name = wanted in views ? wanted : "chat";
  if (name === current) return;
  if (current) views[current].hide();
  current = name;
  for (const each of Object.keys(views)) {
    byId(`view-${each}`).hidden = each !== name;
    const link = document.querySelector(`.tabs a[href="#${each}"]`);
    if (each === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = name === "chat" ? "Headrace" : `${name[0].toUpperCase()}${name.slice(1)} · Headrace`;
  views[name].show();
}

// ---- the server's state -------------------------------------------------------------------------

async function watch() {
  if (!document.hidden) await check();
  setTimeout(watch, STATE_PERIOD_S * 1000);
}

async function check() {
  const state = await serverState();
  if (state === "ready" && !info && !(needsKey && !hasKey())) await meet();
  tell(state);
}

/** Ask what is served; a server with keys asks for one here. */
async function meet() {
  try {
    info = await getJson("/server_info");
  } catch (error) {
    if (error.status !== 401) byId("notice").textContent = error.message;
    return;
  }
  needsKey = info.server?.has_api_keys ?? false;
  byId("model").textContent = chat.model = info.served_model_name;
  byId("model").title = `${info.model}, ${info.model_type}`;
  history.start();
  if (current !== "chat") views[current].show();
}

function tell(state) {
  const [name, words] = STATES[state] ?? [state, ""];
  if (state !== known) byId("state").textContent = name;
  known = state;
  byId("state").dataset.state = state;
  const locked = needsKey && !info;
  let notice = words;
  if (!words && locked) notice = "This server needs an API key: enter it with the Key button.";
  byId("notice").hidden = notice === "";
  if (byId("notice").textContent !== notice) byId("notice").textContent = notice;
  byId("key-button").hidden = !needsKey;
  const embeddingsOnly = info?.server?.embeddings_only ? "This server makes embeddings only, no text" : "";
  const obstacle = { loading: "The model is loading", draining: "The server is shutting down", failed: "The engine has failed", gone: "The server can't be reached" }[state];
  chat.obstacle = obstacle ?? (locked ? "Enter the API key first" : info ? embeddingsOnly : "Connecting");
}

history.listen(({ last, error }) => {
  byId("pulse").textContent = error || !last ? "" : `${number(history.rate("step_tokens_total{kind=generation}").at(-1)?.[1] ?? 0)} tok/s · ${number(last.get("num_requests_running") ?? 0)} running`;
});

// ---- the key ------------------------------------------------------------------------------------

const dialog = byId("key-dialog");

function askForKey(text) {
  byId("key-text").textContent = text;
  byId("key-error").hidden = true;
  byId("key-forget").hidden = !hasKey();
  byId("key-input").value = "";
  if (!dialog.open) dialog.showModal();
}

onKeyWanted(() => {
  const isFirst = !needsKey;
  needsKey = true;
  if (dialog.open) return;
  if (isFirst || info) askForKey(hasKey() ? "The server did not accept the key of this tab. Enter another one." : "This server answers only with one of its API keys. Ask whoever runs it.");
  info = null;
  history.stop();
});

byId("key-button").addEventListener("click", () => askForKey(hasKey() ? "This tab has a key. Enter another one, or forget it." : "This server answers only with one of its API keys."));
byId("key-cancel").addEventListener("click", () => dialog.close());
byId("key-forget").addEventListener("click", () => {
  setKey("");
  info = null;
  history.stop();
  views.setup.forget();
  dialog.close();
  tell(known);
});
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey(byId("key-input").value.trim());
  try {
    await getJson("/server_info");
  } catch (error) {
    byId("key-error").textContent = error.message;
    byId("key-error").hidden = false;
    if (error.status === 401) setKey("");
    byId("key-input").select();
    return;
  }
  views.setup.forget();
  dialog.close();
  info = null;
  await check();
});

// ---- the theme ----------------------------------------------------------------------------------

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

function labelTheme() {
  const label = isDark() ? "Switch to the light theme" : "Switch to the dark theme";
  byId("theme-button").setAttribute("aria-label", label);
  byId("theme-button").title = label;
  window.dispatchEvent(new Event("themechange"));
}

byId("theme-button").addEventListener("click", () => {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  delete document.documentElement.dataset.followsSystem;
  store("theme", next, localStorage);
  labelTheme();
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", labelTheme);

window.addEventListener("hashchange", go);
labelTheme();
go();
tell("connecting");
watch();
