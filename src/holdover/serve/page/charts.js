// Charts: steps as cells, settings as points.

import { element } from "./controls.js";

/** One row per branch, one cell per step: tall for computed, low for held, faint for steps to come. */
export function strip(root, trace, steps) {
  const branches = Object.entries(trace);
  root.replaceChildren(
    ...branches.map(([branch, text]) => {
      const cells = Array.from({ length: Math.max(steps, text.length) }, (_, i) => element("i", { className: `cell ${text[i] ?? ""}` }));
      return element("div", { className: "branch" }, element("span", { title: branch }, shortName(branch)), element("div", { className: "cells" }, ...cells));
    }),
  );
  const label = branches.map(([branch, text]) => `${branch}: ${count(text, "C")} computed, ${count(text, "h")} held`);
  root.setAttribute("aria-label", label.join("; ") || "No steps yet");
}

/** Of the branches of two transformers: `1 cond`, `2 cond`. */
const shortName = (branch) => branch.replace(/^transformer(?:_(\d))?\//, (_, number) => `${number ?? 1} `);

export const count = (text, letter) => text.split(letter).length - 1;

const SVG = "http://www.w3.org/2000/svg";
const shape = (tag, attributes, text) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
};

const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [220, 30, 12, 26, 36];

/** PSNR over the reduction of computed forwards: a point for each setting that was tried, and the frontier of the profile if there is one. */
export function plot(root, points, frontier) {
  const WIDTH = Math.max(260, root.clientWidth); // in pixels, so that text keeps its size
  const all = [...points, ...frontier];
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  svg.setAttribute("aria-label", points.map((p) => `${p.label}: ${p.speed.toFixed(2)} times fewer, ${p.psnr.toFixed(1)} decibels`).join("; ") || "Nothing tried yet");
  const right = Math.max(4, Math.ceil(Math.max(0, ...all.map((p) => p.speed))));
  const decibels = all.map((p) => p.psnr);
  const [low, high] = [Math.min(20, ...decibels.map((d) => Math.floor(d / 10) * 10)), Math.max(50, ...decibels.map((d) => Math.ceil(d / 10) * 10))];
  const x = (speed) => LEFT + ((speed - 1) / (right - 1)) * (WIDTH - LEFT - RIGHT);
  const y = (psnr) => HEIGHT - BOTTOM - ((psnr - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  for (let d = low; d <= high; d += 10) {
    svg.append(shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(d), y2: y(d) }), shape("text", { class: "tick end", x: LEFT - 8, y: y(d) + 4 }, d));
  }
  for (let s = 1; s <= right; s += 1) svg.append(shape("text", { class: "tick middle", x: x(s), y: HEIGHT - BOTTOM + 18 }, `${s}×`));
  svg.append(shape("text", { class: "axis end", x: WIDTH - RIGHT, y: HEIGHT - 3 }, "times fewer forwards"), shape("text", { class: "axis", x: 0, y: 12 }, "PSNR, dB"));
  if (frontier.length > 1) svg.append(shape("polyline", { class: "frontier", points: frontier.map((p) => `${x(p.speed)},${y(p.psnr)}`).join(" ") }));
  points.forEach((point, i) => {
    const dot = shape("circle", { class: `dot ${point.method} ${i === points.length - 1 ? "latest" : ""}`, cx: x(point.speed), cy: y(point.psnr), r: i === points.length - 1 ? 7 : 5 });
    dot.append(shape("title", {}, `${point.label}: ${point.speed.toFixed(2)}×, ${point.psnr.toFixed(1)} dB`));
    svg.append(dot);
  });
  const latest = points.at(-1);
  if (latest) {
    const beyond = x(latest.speed) > WIDTH - 150;
    svg.append(shape("text", { class: `label ${beyond ? "end" : ""}`, x: x(latest.speed) + (beyond ? -12 : 12), y: y(latest.psnr) + 4 }, latest.label));
  }
  root.replaceChildren(svg);
}
