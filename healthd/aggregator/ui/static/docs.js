// Finds an entry by a word in it, and opens the one that a link names. Without it the page is whole.
(() => {
  "use strict";
  const form = document.getElementById("find"), word = document.getElementById("word"), found = document.getElementById("found");
  const entries = [...document.querySelectorAll("[data-entry]")];
  if (!form || !word || !found || !entries.length) return;

  const texts = new Map(entries.map((entry) => [entry, entry.textContent.toLowerCase()]));

  const show = () => {
    const wanted = word.value.trim().toLowerCase();
    let shown = 0;
    for (const entry of entries) {
      entry.hidden = wanted !== "" && !texts.get(entry).includes(wanted);
      if (!entry.hidden) shown += 1;
    }
    for (const group of document.querySelectorAll("[data-group]")) {
      group.hidden = !group.querySelector("[data-entry]:not([hidden])");
    }
    found.textContent = wanted ? shown + " of " + entries.length : "";
  };

  const open = () => {
    const entry = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!entry || !texts.has(entry)) return;
    if (entry.hidden) { word.value = ""; show(); }
    entry.open = true;
    entry.scrollIntoView();
  };

  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  word.addEventListener("input", show);
  window.addEventListener("hashchange", open);
  open();
})();
