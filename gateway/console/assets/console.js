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

  // Fields of instants and usual periods in the viewer's time zone too: the address carries instants with a zone.
  const zone = local.resolvedOptions().timeZone;
  const [offset] = new Intl.DateTimeFormat("en", { timeZoneName: "shortOffset" }).formatToParts()
    .filter((part) => part.type === "timeZoneName");
  for (const place of document.querySelectorAll("[data-zone]")) {
    place.textContent = `Times are in ${zone} (${offset.value.replace("GMT", "UTC")}).`;
  }
  const two = (number) => String(number).padStart(2, "0");
  const day = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const instant = /^(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d(?:\.\d+)?)?)(Z|[+-]\d\d:?\d\d)?)?$/;
  const read = (text, otherwise) => {
    const [, date, time = "00:00", own = otherwise] = instant.exec(text.trim()) ?? [];
    const at = new Date(`${date}T${time}${own}`);
    return Number.isNaN(at.getTime()) ? null : at;
  };
  for (const field of document.querySelectorAll("[data-instant]")) {
    const given = field.value;
    const at = read(given, "Z");
    if (at) field.value = `${day(at)} ${at.toTimeString().slice(0, 8)}`;
    const shown = field.value;
    for (const label of field.labels) label.textContent = label.textContent.replace(" (UTC)", "");
    field.form.addEventListener("formdata", ({ formData }) => {
      const typed = read(field.value, "");
      if (typed) formData.set(field.name, field.value === shown ? given : typed.toISOString());
    });
  }
  const today = new Date(new Date().setHours(0, 0, 0, 0));
  const ago = (months, days) => new Date(today.getFullYear(), today.getMonth() - months, days);
  const periods = {
    hour: [new Date(Date.now() - 3600000)], day: [today], week: [ago(0, today.getDate() - 6)],
    month: [ago(0, 1)], "last-month": [ago(1, 1), ago(0, 1)],
  };
  for (const link of document.querySelectorAll("[data-period]")) {
    const address = new URL(link.href);
    periods[link.dataset.period].forEach((at, index) => {
      address.searchParams.set(index ? "to" : "from", at.toISOString());
    });
    link.href = address;
  }

  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    document.getElementById("search-all")?.focus();
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
