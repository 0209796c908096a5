// Light or dark by the system's choice, before the first paint and whenever it changes.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const apply = () => { root.dataset.bsTheme = dark.matches ? "dark" : "light"; };
  root.dataset.scripts = "on";
  apply();
  dark.addEventListener("change", () => { apply(); dispatchEvent(new Event("theme")); });
})();
