"use strict";
const images = document.getElementById("images");
for (const choice of document.querySelectorAll("input[name=show]"))
  choice.addEventListener("change", () => images.classList.toggle("differences", choice.value === "differences"));

for (const tile of document.querySelectorAll("button.tile"))
  tile.addEventListener("click", () => tile.setAttribute("aria-pressed", tile.getAttribute("aria-pressed") !== "true"));

// Clips that are on the screen play in step, at one position that the slider shows and sets.
const clips = [...document.querySelectorAll("video")], play = document.getElementById("play");
if (play) {
  const slider = document.getElementById("frame"), at = document.getElementById("at"), frames = Number(slider.max);
  const shown = new Set();
  let playing = false, position = 0;
  const show = () => {
    slider.value = Math.min(frames, 1 + Math.floor(position * frames));
    at.textContent = `frame ${slider.value} of ${frames}`;
  };
  const seek = (clip) => { if (clip.duration) clip.currentTime = position * clip.duration; };
  const start = (clip) => { seek(clip); clip.play().catch(() => {}); };
  const set = (on) => {
    playing = on;
    play.textContent = on ? "Pause" : "Play";
    for (const clip of shown) if (on) start(clip); else { clip.pause(); seek(clip); }
  };
  const follow = () => {
    const [lead, ...others] = shown;
    if (playing && lead && lead.duration) {
      position = lead.currentTime / lead.duration;
      for (const clip of others) {
        const apart = Math.abs(clip.currentTime - lead.currentTime);
        if (Math.min(apart, lead.duration - apart) > 0.12 && !clip.seeking) seek(clip);
      }
      show();
    }
    requestAnimationFrame(follow);
  };
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) { shown.add(target); if (playing) start(target); else seek(target); }
      else { shown.delete(target); target.pause(); }
    }
  });
  for (const clip of clips) {
    seen.observe(clip);
    clip.addEventListener("loadedmetadata", () => seek(clip));
  }
  play.addEventListener("click", () => set(!playing));
  slider.addEventListener("input", () => { position = (slider.value - 0.5) / frames; set(false); show(); });
  set(!matchMedia("(prefers-reduced-motion: reduce)").matches);
  requestAnimationFrame(follow);
}

// On a phone all rows scroll sideways together, so that a column stays one prompt.
const rows = [...document.querySelectorAll(".tiles")];
for (const row of rows)
  row.addEventListener("scroll", () => {
    for (const other of rows)
      if (Math.abs(other.scrollLeft - row.scrollLeft) > 1) other.scrollLeft = row.scrollLeft;
  }, { passive: true });

const body = document.querySelector("#table tbody");
const heads = [...document.querySelectorAll("#table thead th")];
const key = (row, column) => {
  const text = row.children[Math.min(column, row.children.length - 1)].dataset.key;
  return column === 0 ? text : Number(text);
};
const compare = (a, b) => {
  if (typeof a === "string") return a.localeCompare(b, "en", { numeric: true });
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
  return a === b ? 0 : a - b;
};
heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of heads) other.setAttribute("aria-sort", other === head ? order : "none");
  const sign = order === "ascending" ? 1 : -1;
  body.append(...[...body.rows].sort((a, b) => sign * compare(key(a, column), key(b, column))));
}));

// A long table shows its first rows, which are those that the header was sorted by, until it is unfolded.
const SHOWN = 14, unfold = document.getElementById("unfold");
if (body.rows.length > SHOWN + 4) {
  body.classList.add("folded");
  unfold.hidden = false;
  unfold.addEventListener("click", () => { body.classList.remove("folded"); unfold.hidden = true; });
}
