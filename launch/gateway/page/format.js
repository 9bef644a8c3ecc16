"use strict";
// Helpers of the other files: elements, numbers, times and colours.

const MOTION = matchMedia("(prefers-reduced-motion: reduce)");
const DARK = matchMedia("(prefers-color-scheme: dark)");

function byId(id) {
  return document.getElementById(id);
}

/** Always as text, never as markup: request ids are chosen by clients. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setLabel(element, text) {
  if (element.getAttribute("aria-label") !== text) element.setAttribute("aria-label", text);
}

function make(tag, className, parent) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (parent) parent.append(element);
  return element;
}

/** Three significant digits and a unit, as in `triptych top`. */
function number(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= 0.9995 * size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return String(Number(value.toPrecision(3)));
}

function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  if (ms < 60000) return `${(ms / 1000).toFixed(1)} s`;
  return `${Math.floor(ms / 60000)}m${String(Math.floor(ms / 1000) % 60).padStart(2, "0")}`;
}

/** Neighbouring slots get hues that are far apart. */
function hueOf(slot) {
  return Math.round((slot * 137.508 + 255) % 360);
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/** The value of a style sheet colour, for drawing on a canvas. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}
