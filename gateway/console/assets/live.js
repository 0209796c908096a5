// Live regions. `<div data-live="ADDRESS">` shows what ADDRESS streams, a route that answers with `live_region`
// (gateway/console/live/stream.py); htmx morphs its content, so focus stays. `data-state` says how it stands: on, lost,
// stopped. All tabs of a browser share one connection, which a shared worker holds (this same file); where there are no
// shared workers, a page has its own. Hidden tabs let go.
(() => {
  const RETRY_MS = 1000, SILENT_MS = 15000, GONE_MS = 40000, SAY_MS = 10000, LOST_MS = 5000;

  // The connection. Each tab says again and again which regions it shows: `{id: address}`.
  const connection = () => {
    const tabs = new Map();
    let source = null, timer = 0, heard = 0, delay = RETRY_MS;
    const wanted = () => [...tabs.values()].flatMap((tab) => Object.entries(tab.regions));
    const openIn = (ms) => { clearTimeout(timer); timer = setTimeout(open, ms); };
    const open = () => {
      source?.close();
      source = null;
      const regions = wanted();
      if (!regions.length) return;
      heard = Date.now();
      source = new EventSource(`/console/streams?${new URLSearchParams(regions)}`);
      for (const kind of ["message", "stopped", "ended"]) source.addEventListener(kind, pass);
      source.onerror = () => {
        source.close();
        openIn(delay * (1 + Math.random()));
        delay = Math.min(2 * delay, SILENT_MS);
      };
    };
    const pass = ({ type, data, lastEventId: id }) => {
      heard = Date.now();
      delay = RETRY_MS;
      for (const [port, tab] of tabs) {
        if (!(id in tab.regions)) continue;
        if (type !== "message") delete tab.regions[id];
        port.postMessage({ type, data, id });
      }
      if (!wanted().length) open();
    };
    setInterval(() => {
      const now = Date.now();
      for (const [port, tab] of tabs) if (now - tab.heard > GONE_MS) tabs.delete(port);
      if (source && now - heard > SILENT_MS) open();
    }, 5000);
    return (port) => {
      port.onmessage = ({ data: regions }) => {
        const before = JSON.stringify(tabs.get(port)?.regions ?? {});
        tabs.set(port, { regions, heard: Date.now() });
        // A moment later: who goes from tab to tab changes two.
        if (JSON.stringify(regions) !== before) openIn(200);
      };
    };
  };

  if (typeof document === "undefined") {
    const join = connection();
    onconnect = (event) => join(event.ports[0]);
    return;
  }

  const regions = new Map();
  for (const element of document.querySelectorAll("[data-live]")) {
    const id = Math.random().toString(36).slice(2);
    const box = document.createElement("p");
    box.innerHTML = '<span role="status"></span> <span></span>';
    box.className = "unseen";
    element.before(box);
    regions.set(id, { element, box, shown: Date.now() });
  }
  if (!regions.size) return;
  const title = document.title;
  let since = Date.now(), port;

  const show = (region, state, words, age = "") => {
    region.box.className = words && state !== "on" ? `alert ${state === "lost" ? "alert-danger" : "alert-info"}` : "unseen";
    const [status, old] = region.box.children;
    if (status.innerHTML !== words) status.innerHTML = words;
    old.textContent = age;
    region.element.dataset.state = state;
    document.title = document.querySelector("[data-state=lost], [data-state=stopped]") ? `Not live: ${title}` : title;
  };
  const take = async ({ data: { type, data, id } }) => {
    const region = regions.get(id);
    if (!region) return;
    const { element, box } = region;
    if (type === "message") {
      const wasLost = element.dataset.state === "lost";
      region.shown = Date.now();
      show(region, "on", wasLost ? "Live again." : box.firstChild.innerHTML);
      // Rows come and go, but not while a pointer is on a button: it could hit another row's.
      if (element.querySelector("[data-still]:hover")) return;
      await htmx.swap({ text: data, target: element, sourceElement: element, swap: "innerMorph" });
      return;
    }
    regions.delete(id);
    show(region, "stopped", data);
    if (type === "ended") document.querySelector("main").replaceChildren(...document.querySelectorAll("main h1"), box);
  };
  const say = (isHere = !document.hidden) => {
    const shown = isHere ? [...regions].map(([id, { element }]) => [id, element.dataset.live]) : [];
    port.postMessage(Object.fromEntries(shown));
  };
  const use = (other) => { port = other; port.onmessage = take; say(); };
  const alone = () => {
    const { port1, port2 } = new MessageChannel();
    connection()(port1);
    use(port2);
  };
  try {
    const worker = new SharedWorker(document.currentScript.src);
    worker.onerror = alone;
    use(worker.port);
  } catch {
    alone();
  }

  document.addEventListener("visibilitychange", () => { since = Date.now(); say(); });
  addEventListener("pagehide", () => say(false));
  addEventListener("pageshow", () => say());
  setInterval(say, SAY_MS);
  setInterval(() => {
    const now = Date.now();
    for (const region of regions.values()) {
      if (document.hidden || now - Math.max(region.shown, since) < LOST_MS) continue;
      show(region, "lost", "Connection lost. Reconnecting.", `Figures as of ${Math.round((now - region.shown) / 1000)} s ago.`);
    }
  }, 1000);
})();
