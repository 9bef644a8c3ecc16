// The three panels: one chip per request, in the lane of its state, and the figures of the stage.

const MAX_CHIPS = 120; // per lane; the rest is shown as a number
const MANY = 40; // chips from which they are drawn small
const NUM_FINISHED = 32; // ended requests, as long as they are remembered
const OVER = { stop: "finished", length: "finished", abort: "aborted", error: "failed" };

/** A request of a frame as an object; `stages_ms` stays a list in the order of the frame's `stages`. */
function asRequests(frame) {
  const read = (row) => Object.fromEntries(frame.columns.map((name, index) => [name, row[index]]));
  const ended = frame.ended.map(read);
  const known = new Set(ended.map((request) => request.id));
  const live = frame.requests.map(read).filter((request) => !known.has(request.id) || request.state !== "ended");
  return { live, ended };
}

class Panels {
  constructor() {
    this.lanes = new Map();
    this.chips = new Map(); // by request id and slot: either may be reused, both together hardly ever
    for (const box of document.querySelectorAll(".lanes")) {
      for (const name of box.dataset.lanes.split(" ")) {
        const lane = make("div", "lane", box);
        const label = make("b", "", lane);
        label.append(name);
        const count = make("span", "", label);
        const chips = make("div", "chips", lane);
        chips.setAttribute("aria-hidden", "true"); // the list below has the same in words
        this.lanes.set(name, { lane, count, chips });
      }
    }
  }

  update(frame, requests) {
    for (const [role, panel] of Object.entries(frame.panels)) this.updatePanel(byId(role), panel);
    const inLane = new Map([...this.lanes.keys()].map((name) => [name, []]));
    for (const request of requests.live) inLane.get(request.state).push(request);
    inLane.get("ended").push(...requests.ended.slice(0, NUM_FINISHED));
    const before = this.places();
    const seen = new Set();
    for (const [name, list] of inLane) this.fill(this.lanes.get(name), list, seen);
    for (const [key, chip] of this.chips) {
      if (!seen.has(key)) {
        chip.remove();
        this.chips.delete(key);
      }
    }
    this.glide(before);
  }

  updatePanel(element, panel) {
    const isReady = panel.phase === "ready";
    element.dataset.tone = panel.healthy ? "good" : isReady ? "bad" : "wait";
    const heading = element.querySelector("h2");
    const phase = heading.querySelector(".phase") || make("span", "phase", heading);
    const state = panel.healthy ? "" : isReady ? "stuck" : panel.phase;
    const start = panel.life > 1 ? `start ${panel.life}` : "";
    setText(phase, [state, start].filter(Boolean).join(" · "));
    const list = element.querySelector("dl");
    panel.figures.forEach((figure, index) => this.updateFigure(list.children[index] || make("div", "", list), figure));
    while (list.children.length > panel.figures.length) list.lastChild.remove();
  }

  updateFigure(line, [, label, value, gauge, tone]) {
    if (!line.firstChild) {
      make("dt", "", line);
      make("dd", "", line);
    }
    setText(line.children[0], label);
    setText(line.children[1], value);
    line.children[1].dataset.tone = tone;
    if (!gauge) return;
    const bar = line.children[2] || make("div", "gauge", line);
    const fill = bar.firstChild || make("i", "", bar);
    bar.setAttribute("aria-hidden", "true");
    fill.style.width = `${Math.min(100, (100 * gauge[0]) / Math.max(1, gauge[1]))}%`;
  }

  fill({ lane, count, chips }, list, seen) {
    setText(count, String(list.length));
    lane.classList.toggle("many", list.length > MANY);
    list.slice(0, MAX_CHIPS).forEach((request, index) => {
      seen.add(request.id);
      const chip = this.chipOf(request);
      if (chips.children[index] !== chip) chips.insertBefore(chip, chips.children[index] || null);
    });
    const more = chips.querySelector(".more");
    if (list.length > MAX_CHIPS) {
      const note = more || make("span", "more", chips);
      setText(note, `+${list.length - MAX_CHIPS}`);
      chips.append(note);
    } else if (more) more.remove();
  }

  chipOf(request) {
    let chip = this.chips.get(request.id);
    if (!chip) this.chips.set(request.id, (chip = make("span", "chip")));
    const isOver = request.state in OVER || request.state === "ended";
    const share = isOver ? 1 : request.tokens / Math.max(1, request.max_tokens);
    chip.classList.toggle("aborted", request.state === "abort");
    chip.classList.toggle("error", request.state === "error");
    chip.classList.toggle("mine", chosen.id === request.id);
    chip.style.setProperty("--hue", hueOf(request.slot));
    chip.style.setProperty("--done", `${Math.round(100 * share)}%`);
    chip.title = request.id;
    return chip;
  }

  places() {
    const places = new Map();
    if (MOTION.matches) return places;
    for (const [key, chip] of this.chips) places.set(key, { lane: chip.parentElement, box: chip.getBoundingClientRect() });
    return places;
  }

  /** Animates chips that change their lane, unless reduced motion is preferred; within a lane nothing moves. */
  glide(before) {
    if (MOTION.matches) return;
    for (const [key, chip] of this.chips) {
      const from = before.get(key);
      if (!from) {
        chip.animate([{ opacity: 0, transform: "scale(.4)" }, {}], { duration: 250, easing: "ease-out" });
      } else if (from.lane !== chip.parentElement) {
        const to = chip.getBoundingClientRect();
        const by = `translate(${from.box.left - to.left}px, ${from.box.top - to.top}px)`;
        chip.animate([{ transform: by, zIndex: 1 }, { zIndex: 1 }], { duration: 450, easing: "cubic-bezier(.3, .8, .3, 1)" });
      }
    }
  }
}
