"use strict";
// A line names its set of nodes; lines whose sets have a node in common are counterparts.
const all = (what, inside = document) => [...inside.querySelectorAll(what)];
const sets = JSON.parse(document.getElementById("sets").textContent);
const rungs = all(".rung");
const links = all(".ladder li");
const state = document.getElementById("state");
const search = document.getElementById("search");
const only = document.getElementById("only");
const lines = all(".text span[data-s]");
const bySet = new Map();
for (const line of lines) {
  const set = Number(line.dataset.s);
  bySet.has(set) ? bySet.get(set).push(line) : bySet.set(set, [line]);
}
const byNode = new Map();
sets.forEach((nodes, set) => {
  for (const node of nodes) byNode.has(node) ? byNode.get(node).push(set) : byNode.set(node, [set]);
});
let here = 0, picked = null, lit = [], hits = [], at = -1;

function counterparts(set) {
  return new Set(sets[set].flatMap((node) => byNode.get(node)));
}

// Scroll inside of a rung alone, so that the page stays where the reader is.
function show(line) {
  const box = line.closest(".text"), around = line.closest("details");
  if (around) around.open = true;
  const top = line.getBoundingClientRect().top - box.getBoundingClientRect().top;
  if (top < 0 || top > box.clientHeight - 40) box.scrollTop += top - box.clientHeight / 3;
}

function clear() {
  for (const line of lit) line.classList.remove("lit", "picked");
  for (const part of all(".some")) part.classList.remove("some");
  lit = [];
  picked = null;
  links.forEach((link) => {
    link.classList.remove("has");
    link.querySelector("output").textContent = "";
  });
  state.textContent = "";
}

function pick(line) {
  const anchor = line.getBoundingClientRect().top;
  clear();
  picked = line;
  for (const set of counterparts(Number(line.dataset.s))) lit.push(...bySet.get(set) ?? []);
  for (const other of lit) {
    other.classList.add("lit");
    other.closest(".rung").classList.add("some");
    other.closest("details")?.classList.add("some");
  }
  line.classList.add("picked");
  rungs.forEach((rung, n) => {
    const found = all(".lit", rung);
    links[n].classList.toggle("has", found.length > 0);
    links[n].querySelector("output").textContent = found.length || "";
    if (found.length && !rung.contains(line)) show(found[0]);
  });
  go(rungs.indexOf(line.closest(".rung")), false);
  const many = lit.length - 1, on = links.filter((link) => link.classList.contains("has")).length;
  state.textContent = `${many} counterpart${many === 1 ? "" : "s"} on ${on} rungs`;
  window.scrollBy(0, line.getBoundingClientRect().top - anchor);
}

function go(n, scroll = true) {
  if (n < 0 || n >= rungs.length) return;
  here = n;
  links.forEach((link, m) => link.classList.toggle("here", m === n));
  rungs[n].focus({ preventScroll: true });
  if (!scroll) return;
  rungs[n].scrollIntoView({ block: "nearest" });
  const first = rungs[n].querySelector(".lit");
  if (first) show(first);
}

function step(by) {
  const own = all("span[data-s]", rungs[here]).filter((line) => line.offsetParent !== null);
  const next = own[Math.max(0, own.indexOf(picked) + by)];
  if (!next || next === picked) return;
  pick(next);
  show(next);
}

function turn(button, on) {
  button.setAttribute("aria-pressed", on);
  document.body.classList.toggle("only", on);
}

function theme() {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === "dark";
  root.dataset.theme = dark ? "light" : "dark";
}

// Lines that have the text are marked; of kernels, passes and table rows the others are hidden.
function find(text) {
  for (const line of hits) line.classList.remove("hit");
  const wanted = text.trim().toLowerCase();
  const has = (part) => part.textContent.toLowerCase().includes(wanted);
  hits = wanted ? all(".text span").filter(has) : [];
  for (const line of hits) line.classList.add("hit");
  for (const row of all(".rows > details, tbody tr")) row.classList.toggle("gone", wanted !== "" && !has(row));
  at = -1;
  state.textContent = wanted ? `${hits.length} line${hits.length === 1 ? "" : "s"}; Enter goes on` : "";
}

function next() {
  if (!hits.length) return;
  at = (at + 1) % hits.length;
  const line = hits[at];
  go(rungs.indexOf(line.closest(".rung")));
  if (line.dataset.s !== undefined) pick(line);
  show(line);
  search.focus({ preventScroll: true });
  state.textContent = `line ${at + 1} of ${hits.length}`;
}

document.getElementById("ladder").addEventListener("click", (event) => {
  const line = event.target.closest("span[data-s]");
  if (line && String(getSelection()) === "") line === picked ? clear() : pick(line);
});
only.addEventListener("click", () => turn(only, only.getAttribute("aria-pressed") !== "true"));
document.getElementById("theme").addEventListener("click", theme);
search.addEventListener("input", () => find(search.value));
links.forEach((link, n) => link.addEventListener("click", (event) => {
  event.preventDefault();
  go(n);
}));

function opened() {
  const part = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (part instanceof HTMLDetailsElement) part.open = true;
}
addEventListener("hashchange", opened);
opened();

const keys = {
  ArrowDown: () => go(here + 1), ArrowUp: () => go(here - 1),
  ArrowRight: () => step(1), ArrowLeft: () => step(-1),
  "/": () => search.focus(), f: () => only.click(), t: theme,
};
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    search.value = "";
    find("");
    clear();
    rungs[here].focus({ preventScroll: true });
  } else if (event.target === search) {
    if (event.key === "Enter") next();
  } else if (keys[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    keys[event.key]();
  }
});
