// Before the first paint: the theme that was chosen last, or, as long as none was, the system's.
"use strict";
(() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem("headrace.theme");
  } catch {
    // A browser that keeps nothing follows the system.
  }
  const follow = () => {
    if ("followsSystem" in root.dataset) root.dataset.theme = dark.matches ? "dark" : "light";
  };
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  else root.dataset.followsSystem = "";
  follow();
  dark.addEventListener("change", follow);
})();
