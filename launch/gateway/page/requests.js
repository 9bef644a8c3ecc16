// The list of requests: for each a bar of where its time went, and its progress.

const MAX_ROWS = 100; // live requests first; the rest is shown as a number
const MAX_ENDED = 24;

const chosen = { id: null, isPinned: false }; // the request whose pages and chip are highlighted

class Rows {
  constructor(onChoose) {
    this.list = byId("rows");
    this.rows = new Map(); // by request id
    this.onChoose = onChoose;
    this.list.addEventListener("keydown", (event) => this.walk(event));
    addEventListener("keydown", (event) => event.key === "Escape" && this.choose(null, false));
  }

  update(frame, { live, ended }) {
    const shown = [...live.slice(0, MAX_ROWS), ...ended.slice(0, MAX_ENDED)];
    const pages = new Map(frame.pages ? frame.pages.held : []);
    const present = new Set(shown.map((request) => request.id));
    for (const [id, row] of this.rows) {
      if (!present.has(id)) {
        row.parentElement.remove();
        this.rows.delete(id);
      }
    }
    if (chosen.id !== null && !present.has(chosen.id)) this.choose(null, false);
    shown.forEach((request, index) => {
      const row = this.rows.get(request.id) || this.add(request.id);
      this.fill(row, request, frame.stages, pages.get(request.slot));
      const item = row.parentElement;
      // Only misplaced rows are moved: moving a row would take the keyboard focus from it.
      if (this.list.children[index] !== item) this.list.insertBefore(item, this.list.children[index] || null);
    });
    const hidden = frame.left_out + Math.max(0, live.length - MAX_ROWS);
    const more = hidden ? `, ${hidden} more are not listed` : "";
    setText(byId("requests-now"), `${live.length + frame.left_out} live${more}`);
    byId("nothing").hidden = shown.length > 0;
  }

  add(id) {
    const row = make("button", "row", make("li", "", this.list));
    row.type = "button";
    for (const name of ["dot", "id", "state", "bar"]) make("span", name, row);
    for (const name of ["wall", "tokens", "rate", "pages"]) make("span", `${name} number`, row);
    row.addEventListener("click", () => this.choose(id, !(chosen.isPinned && chosen.id === id)));
    row.addEventListener("mouseenter", () => chosen.isPinned || this.choose(id, false));
    row.addEventListener("mouseleave", () => chosen.isPinned || this.choose(null, false));
    row.addEventListener("focus", () => chosen.isPinned || (row.matches(":focus-visible") && this.choose(id, false)));
    row.addEventListener("blur", () => chosen.isPinned || this.choose(null, false));
    this.rows.set(id, row);
    return row;
  }

  fill(row, request, stages, numPages) {
    const isOver = request.state in OVER;
    const wall = sum(request.stages_ms);
    const state = OVER[request.state] || request.state;
    const [, id, stateCell, bar, wallCell, tokens, rate, pages] = row.children;
    row.toggleAttribute("data-over", isOver);
    row.style.setProperty("--hue", hueOf(request.slot));
    row.classList.toggle("mine", chosen.id === request.id);
    row.setAttribute("aria-pressed", String(chosen.isPinned && chosen.id === request.id));
    setText(id, request.id);
    setText(stateCell, state);
    stateCell.dataset.state = request.state;
    this.fillBar(bar, request.stages_ms, stages, wall);
    setText(wallCell, duration(wall));
    setText(tokens, `${request.tokens}/${request.max_tokens} tok`);
    setText(rate, request.tokens_per_second === null ? "–" : `${number(request.tokens_per_second)}/s`);
    setText(pages, !isOver && numPages ? `${numPages} pages` : request.cached_tokens ? `${request.cached_tokens} cached` : "");
    const spent = stages.map((name, index) => [name, request.stages_ms[index]]).filter(([, ms]) => ms >= 0.1);
    setLabel(row, `${request.id}, ${state}, ${request.tokens} of ${request.max_tokens} tokens, ${duration(wall)}`);
    row.title = spent.map(([name, ms]) => `${name} ${duration(ms)}`).join(" · ");
  }

  fillBar(bar, stagesMs, stages, wall) {
    stages.forEach((name, index) => {
      const part = bar.children[index] || make("i", name, bar);
      const share = wall ? (100 * stagesMs[index]) / wall : 0;
      part.hidden = share < 0.05;
      part.style.width = `${share}%`;
    });
  }

  choose(id, isPinned) {
    [chosen.id, chosen.isPinned] = [id, isPinned && id !== null];
    document.body.classList.toggle("chosen", id !== null);
    for (const [name, row] of this.rows) {
      row.classList.toggle("mine", name === id);
      row.setAttribute("aria-pressed", String(chosen.isPinned && name === id));
    }
    this.onChoose();
  }

  walk(event) {
    const item = document.activeElement.closest("li");
    const to = { ArrowDown: item?.nextElementSibling, ArrowUp: item?.previousElementSibling,
                 Home: this.list.firstElementChild, End: this.list.lastElementChild }[event.key];
    if (!to) return;
    event.preventDefault();
    to.firstElementChild.focus();
  }
}
