// Keeps what is shown in step with the fleet. Without it the page is whole, and as old as its loading.
(() => {
  "use strict";
  const main = document.querySelector("main[data-topic]");
  const light = document.getElementById("live");
  if (!main || !light || !window.EventSource || !window.DOMParser) return;

  const BEAT_MS = 40000; // the server says something every 15 s
  const FETCH_MS = 1000; // at most one page a second, however much changes
  let cursor = main.dataset.after;
  let source = null, watchdog = 0, pause = 1000;
  let due = 0, fetching = false, again = false, wholeWanted = false, lastFetch = 0, lastReset = 0;

  const say = (text, on) => {
    light.hidden = false;
    light.className = on ? "live" : "live off";
    if (light.textContent !== text) light.textContent = text;
  };

  const alive = (event) => {
    if (event && event.lastEventId) cursor = event.lastEventId;
    say("live", true);
    pause = 1000;
    clearTimeout(watchdog);
    watchdog = setTimeout(lost, BEAT_MS);
  };

  const lost = () => {
    clearTimeout(watchdog);
    if (source) source.close();
    source = null;
    say("not live, trying again", false);
    setTimeout(open, pause);
    pause = Math.min(2 * pause, 30000);
  };

  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource("/events?topic=" + encodeURIComponent(main.dataset.topic) + "&after=" + encodeURIComponent(cursor));
    source.addEventListener("open", () => alive(null));
    source.addEventListener("error", lost); // its own way of trying again forgets the cursor when the server says no
    source.addEventListener("beat", (event) => { alive(event); refresh(false); }); // for ages, and what could not be read
    source.addEventListener("changed", (event) => { alive(event); refresh(false); });
    source.addEventListener("reset", (event) => { alive(event); refresh(true); });
    source.addEventListener("cells", (event) => {
      alive(event);
      const told = JSON.parse(event.data);
      for (const cell of told.cells) paint(cell);
      refresh(told.regroup);
    });
  };

  const paint = (cell) => {
    const link = document.getElementById("c-" + cell.node);
    if (!link) return;
    if (link.getAttribute("aria-label") === cell.label) return;
    link.className = cell.tone + " fresh";
    link.setAttribute("aria-label", cell.label);
    link.querySelector("i").textContent = cell.sign;
    setTimeout(() => link.classList.remove("fresh"), 1500);
  };

  // Fetch the page (or all of it but the grid) and put its live parts in the place of ours.
  const refresh = (whole) => {
    wholeWanted = wholeWanted || whole;
    if (fetching) { again = true; return; }
    clearTimeout(due);
    due = setTimeout(load, Math.max(0, lastFetch + FETCH_MS - Date.now()));
  };

  const load = async () => {
    const url = new URL(location.href);
    url.searchParams.delete("done");
    const whole = wholeWanted;
    if (main.dataset.part && !whole) url.searchParams.set("part", main.dataset.part);
    let read = false;
    fetching = true; wholeWanted = false; lastFetch = Date.now();
    try {
      const answer = await fetch(url, { credentials: "same-origin", cache: "no-store" });
      if (answer.redirected) { location.reload(); return; }
      if (answer.ok) {
        replace(new DOMParser().parseFromString(await answer.text(), "text/html"), whole);
        read = true;
      } else say("not live, trying again", false);
    } catch (error) {
      lost();
    } finally {
      fetching = false;
      wholeWanted = wholeWanted || (whole && !read);
      if (again) { again = false; refresh(false); }
    }
  };

  const replace = (fresh, whole) => {
    document.title = fresh.title;
    for (const part of fresh.querySelectorAll("[data-live]")) swap(part);
    if (whole && fresh.getElementById("groups")) swap(fresh.getElementById("groups"));
  };

  const swap = (part) => {
    const old = part.id && document.getElementById(part.id);
    if (!old || old.outerHTML === part.outerHTML) return;
    const focus = document.activeElement;
    const inside = focus && old.contains(focus) ? focus : null;
    const key = inside && (inside.id ? "#" + CSS.escape(inside.id) : inside.getAttribute("href") && 'a[href="' + CSS.escape(inside.getAttribute("href")) + '"]');
    for (const open of old.querySelectorAll("details[open]")) {
      const same = open.id && part.querySelector("#" + CSS.escape(open.id));
      if (same) same.open = true;
    }
    old.replaceWith(document.adoptNode(part));
    const target = key && part.querySelector(key);
    if (target) target.focus({ preventScroll: true });
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      // A page that nobody sees holds no place; when it is seen again it reads on from its cursor.
      clearTimeout(watchdog);
      if (source) source.close();
      source = null;
    } else {
      open();
    }
  });
  window.addEventListener("pagehide", () => { if (source) source.close(); });
  open();
})();
