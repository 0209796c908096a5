// What pages gain with scripts: times in the viewer's zone, the menu on narrow screens, copying of secrets,
// cards on phones. Without scripts every page still works.
(() => {
  const local = new Intl.DateTimeFormat(undefined, {
    year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
  });
  const localise = (root) => {
    for (const element of root.querySelectorAll("time[datetime]:not([data-local])")) {
      element.textContent = local.format(new Date(element.dateTime));
      element.dataset.local = "yes";
    }
  };
  localise(document);
  new MutationObserver((changes) => {
    for (const change of changes) {
      for (const node of change.addedNodes) if (node.nodeType === 1) localise(node.parentElement ?? node);
    }
  }).observe(document.body, { childList: true, subtree: true });

  document.addEventListener("click", (event) => {
    const menu = event.target.closest("[data-menu]");
    if (menu) {
      const isOpen = document.getElementById("menu").classList.toggle("open");
      menu.setAttribute("aria-expanded", String(isOpen));
    }
    const button = event.target.closest(".row-button");
    if (button) button.setAttribute("aria-expanded", String(button.closest("tr").toggleAttribute("data-open")));
    const copy = event.target.closest("[data-copy]");
    if (copy) {
      navigator.clipboard.writeText(document.getElementById(copy.dataset.copy).value)
        .then(() => { copy.textContent = "Copied"; });
    }
  });

  // A list holds still and says how many rows are new; a click loads them. It asks for an hour, so that a page that
  // was left open does not keep its session alive.
  for (const place of document.querySelectorAll("[data-new]")) {
    let times = 240;
    const asking = setInterval(async () => {
      if (document.hidden) return;
      times -= 1;
      if (times === 0) clearInterval(asking);
      const answer = await fetch(place.dataset.new).catch(() => null);
      if (!answer?.ok || answer.redirected) return;
      const words = await answer.text();
      place.querySelector("a").textContent = words;
      place.hidden = words === "";
    }, 15000);
  }

  // A live region is morphed: cards stay open, and its times change without being new elements.
  htmx.config.morphIgnore.push("data-open", "aria-expanded");
  document.addEventListener("htmx:after:swap", (event) => localise(event.target));
})();
