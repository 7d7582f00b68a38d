// Search as you type, `/` for the search, arrow keys in the grid, local time. Without it all pages work by links and forms.
(() => {
  "use strict";
  const TYPING_MS = 200;

  // --- search as you type: the grid (or what is listed) is fetched anew, and the address says what is shown
  const filters = document.querySelector("form.filters");
  const search = document.querySelector("main input[type=search]");
  let timer = 0, asked = 0, running = null;

  const show = async () => {
    const url = new URL(filters.action, location.href);
    for (const [name, value] of new FormData(filters)) if (value) url.searchParams.set(name, value);
    const number = ++asked;
    running = new AbortController();
    const part = new URL(url);
    if (url.pathname === "/") part.searchParams.set("part", "grid");
    let answer;
    try {
      answer = await fetch(part, { credentials: "same-origin", cache: "no-store", signal: running.signal });
    } catch (error) {
      return; // more was typed, or the light says that we are not live
    }
    if (answer.redirected) { location.reload(); return; }
    if (!answer.ok || number !== asked) return;
    const text = await answer.text().catch(() => null); // null: more was typed while it came
    if (text === null || number !== asked) return;
    const fresh = new DOMParser().parseFromString(text, "text/html");
    history.replaceState(null, "", url);
    for (const id of ["found", "groups", "pages", "several", "open", "decided"]) {
      const old = document.getElementById(id), other = fresh.getElementById(id);
      if (old && other) old.replaceWith(document.adoptNode(other));
    }
    arrange();
  };

  if (filters && search && "search" in search.dataset && window.DOMParser) {
    const later = () => {
      clearTimeout(timer);
      if (running) running.abort(); // what it asks for is no longer wanted
      timer = setTimeout(show, TYPING_MS);
    };
    filters.addEventListener("input", later);
    filters.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(timer); show(); });
    const button = filters.querySelector("button[type=submit]");
    if (button) button.hidden = true;
  }

  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea, [contenteditable]") || !search) return;
    event.preventDefault();
    search.focus();
    search.select();
  });

  // --- the grid is one stop of Tab; arrow keys go from cell to cell
  const cells = () => [...document.querySelectorAll(".cells a")];
  let at = "";

  const arrange = () => {
    const all = cells();
    const current = all.find((cell) => cell.id === at) || all[0];
    for (const cell of all) cell.tabIndex = cell === current ? 0 : -1;
    local();
  };

  const beside = (from, down) => {
    const box = from.getBoundingClientRect(), middle = box.left + box.width / 2;
    let best = null, least = Infinity;
    for (const cell of cells()) {
      const other = cell.getBoundingClientRect();
      const rows = down ? other.top - box.top : box.top - other.top;
      if (rows < box.height / 2) continue;
      const far = rows * 4 + Math.abs(other.left + other.width / 2 - middle);
      if (far < least) { least = far; best = cell; }
    }
    return best;
  };

  document.addEventListener("keydown", (event) => {
    const cell = event.target.closest(".cells a");
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    const all = cells(), i = all.indexOf(cell);
    const next = {
      ArrowRight: () => all[i + 1], ArrowLeft: () => all[i - 1], Home: () => all[0], End: () => all[all.length - 1],
      ArrowDown: () => beside(cell, true), ArrowUp: () => beside(cell, false),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    const target = next();
    if (!target) return;
    target.focus();
  });

  document.addEventListener("focusin", (event) => {
    const cell = event.target.closest(".cells a");
    if (!cell) return;
    for (const other of document.querySelectorAll('.cells a[tabindex="0"]')) other.tabIndex = -1;
    cell.tabIndex = 0;
    at = cell.id;
  });

  // --- local time beside UTC
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const local = () => {
    for (const time of document.querySelectorAll("time[datetime]")) {
      const when = new Date(time.dateTime);
      if (time.dataset.local || isNaN(when)) continue;
      time.dataset.local = "1";
      const here = when.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
      time.title = (time.title || time.textContent) + " = " + here + " " + zone;
      if (time.closest("table, .history") && zone !== "UTC") {
        const beside = document.createElement("span");
        beside.className = "small muted local";
        beside.textContent = when.toLocaleString(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });
        time.after(beside);
      }
    }
  };

  // --- how many nodes are chosen
  const choice = document.getElementById("choice");
  if (choice) choice.addEventListener("change", () => {
    const said = document.getElementById("chosen");
    if (said) said.textContent = choice.querySelectorAll("input[name=node]:checked").length;
  });

  new MutationObserver(arrange).observe(document.body, { childList: true, subtree: true });
  const clock = document.getElementById("clock");
  if (clock && zone !== "UTC") clock.textContent = ", with the local time (" + zone + ") beside them";
  arrange();
})();
