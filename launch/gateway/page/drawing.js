// The three canvases. Each has a label that says in words what it shows.

const FREE = 0, CACHED = 1, LIMBO = 2, SHARED = 3, FIRST_OWNER = 4; // codes of a cell, as execute writes them

/** A cleared context in CSS pixels, sharp on every screen. */
function sheet(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

function scaleLine(context, width, y, text, colour) {
  context.strokeStyle = context.fillStyle = colour("soft");
  context.globalAlpha = 0.35;
  context.setLineDash([2, 4]);
  context.beginPath();
  context.moveTo(0, y + 0.5);
  context.lineTo(width, y + 0.5);
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
  context.font = "11px system-ui, sans-serif";
  context.fillText(text, 0, y - 4);
}

/** A round number at or above `value`: the top of a scale. */
function ceiling(value) {
  const size = 10 ** Math.floor(Math.log10(Math.max(value, 1e-3)));
  return size * [1, 1.5, 2, 3, 4, 5, 7.5, 10].find((step) => step * size >= value * 0.999);
}

const TOP = 18; // room for the label of the scale

function drawRates(canvas, rates, capacity) {
  const colour = colours();
  const { context, width, height } = sheet(canvas);
  const top = ceiling(Math.max(1, ...rates));
  scaleLine(context, width, TOP, number(top), colour);
  const x = (index) => width - (rates.length - 1 - index) * (width / (capacity - 1));
  const y = (rate) => height - 1 - (rate / top) * (height - TOP - 2);
  context.beginPath();
  rates.forEach((rate, index) => context.lineTo(x(index), y(rate)));
  context.strokeStyle = context.fillStyle = colour("decode");
  context.lineWidth = 2;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(x(0), height);
  context.globalAlpha = 0.16;
  context.fill();
  context.globalAlpha = 1;
}

/** One bar per step: its height is the duration, divided by prefill and decode tokens. */
function drawSteps(canvas, steps, capacity) {
  const colour = colours();
  const { context, width, height } = sheet(canvas);
  const top = ceiling(Math.max(0.1, ...steps.ms));
  scaleLine(context, width, TOP, `${number(top)} ms`, colour);
  const pitch = width / capacity;
  steps.ms.forEach((ms, index) => {
    const x = width - (steps.ms.length - index) * pitch;
    const full = Math.max(1, (ms / top) * (height - TOP - 8));
    const tokens = steps.prefill_tokens[index] + steps.decodes[index];
    const prefill = tokens ? (full * steps.prefill_tokens[index]) / tokens : 0;
    const bar = Math.max(1, pitch - (pitch > 4 ? 1 : 0));
    context.fillStyle = colour("decode");
    context.fillRect(x, height - 6 - full, bar, full - prefill);
    context.fillStyle = colour("prefill");
    context.fillRect(x, height - 6 - prefill, bar, prefill);
    if (steps.preempted[index]) {
      context.fillStyle = colour("preempted");
      context.fillRect(x, height - 4, bar, 4);
    }
  });
}

function cellsOf(runs) {
  const cells = [];
  for (let i = 0; i < runs.length; i += 2) for (let n = 0; n < runs[i + 1]; n++) cells.push(runs[i]);
  return cells;
}

/** The size of a cell, the largest that fits, and the number of columns. */
function gridOf(width, height, count) {
  let size = Math.min(18, Math.floor(Math.sqrt((width * height) / Math.max(1, count))));
  while (size > 2 && Math.ceil(count / Math.floor(width / size)) * size > height) size--;
  size = Math.max(size, 2);
  return { size, columns: Math.max(1, Math.floor(width / size)) };
}

function drawPages(canvas, cells, chosenSlot) {
  const colour = colours();
  const { context, width, height } = sheet(canvas);
  const { size, columns } = gridOf(width, height, cells.length);
  const plain = ["free", "cached", "limbo", "shared"].map(colour);
  const [light, saturation] = [colour("request-light"), colour("request-colour")];
  const gap = size > 4 ? 1 : 0;
  cells.forEach((code, index) => {
    const slot = code - FIRST_OWNER;
    context.fillStyle = code < FIRST_OWNER ? plain[code] : `hsl(${hueOf(slot)} ${saturation} ${light})`;
    context.globalAlpha = chosenSlot === null || slot === chosenSlot || code === FREE ? 1 : 0.25;
    context.fillRect((index % columns) * size, Math.floor(index / columns) * size, size - gap, size - gap);
  });
  context.globalAlpha = 1;
}

/** The cell below a pointer, or -1. */
function cellAt(canvas, event, count) {
  const box = canvas.getBoundingClientRect();
  const { size, columns } = gridOf(box.width, box.height, count);
  const [column, row] = [event.clientX - box.left, event.clientY - box.top].map((at) => Math.floor(at / size));
  const index = row * columns + column;
  return column < columns && index >= 0 && index < count ? index : -1;
}
