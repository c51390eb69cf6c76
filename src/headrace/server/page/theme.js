// Before the first paint: the theme that was chosen last, if any; otherwise the system's.
"use strict";
(() => {
  try {
    const chosen = localStorage.getItem("headrace.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // A browser that keeps nothing follows the system.
  }
})();
