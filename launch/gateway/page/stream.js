// The events of the gateway. Not an EventSource, which cannot send headers: a key must not be part of a URL.

const KEY = "triptych.key"; // in the session storage of this tab only
const QUIET_MS = 15000; // without an event for this long the connection counts as lost

class Unauthorized extends Error {}

/** Calls `onFrame` with every event until the server, the network or `signal` ends it. */
async function readEvents(onFrame, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const reply = await fetch("ui/events", { headers, signal, cache: "no-store", credentials: "omit" });
  if (reply.status === 401) throw new Unauthorized();
  if (!reply.ok) throw new Error(`the server answered ${reply.status}`);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    // Only the newest counts, as every event is complete.
    const newest = events.pop();
    if (newest) onFrame(JSON.parse(newest.replace(/^data: /, "")));
  }
}

/** Reads while the page is visible; reports through the callbacks `on`. */
class Stream {
  constructor(on) {
    this.on = on; // {frame, lost, unauthorized}
    this.running = null;
    this.isPaused = false;
    document.addEventListener("visibilitychange", () => this.adjust());
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    this.adjust();
  }

  /** Start or stop reading: a hidden or paused page reads nothing. */
  adjust() {
    const wanted = !this.isPaused && !document.hidden;
    if (wanted && !this.running) {
      this.running = new AbortController();
      this.run(this.running);
    } else if (!wanted && this.running) {
      this.running.abort();
      this.running = null;
    }
  }

  async run(controller) {
    for (let wait = 500; !controller.signal.aborted; wait = Math.min(2 * wait, 8000)) {
      const attempt = new AbortController();
      controller.signal.addEventListener("abort", () => attempt.abort());
      let timer = setTimeout(() => attempt.abort(), QUIET_MS);
      try {
        await readEvents((frame) => {
          wait = 500;
          clearTimeout(timer);
          timer = setTimeout(() => attempt.abort(), QUIET_MS);
          this.on.frame(frame);
        }, attempt.signal);
      } catch (error) {
        if (error instanceof Unauthorized) {
          this.running = null;
          this.on.unauthorized();
          return;
        }
      } finally {
        clearTimeout(timer);
      }
      if (controller.signal.aborted) return;
      this.on.lost();
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}
