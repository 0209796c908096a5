// Draws the numbers of a table above it: `data-chart` on a box before the table says how (lines, stacked, bars),
// the first column is x (`data-x`: time in seconds, or a number), each column of class `number` is a series.
// Cells bring exact numbers in `data-value`; an empty one is a gap.
(() => {
  const NAMES = ["blue", "orange", "teal", "purple", "red", "lime", "cyan", "pink"];
  // A canvas knows no CSS variables: they are resolved through an element.
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  const colour = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
  const axis = () => ({
    stroke: colour("--tblr-body-color"), grid: { stroke: colour("--tblr-border-color"), width: 1 },
    ticks: { stroke: colour("--tblr-border-color"), width: 1 }, size: 60,
  });
  const number = (cell) => (cell && cell.dataset.value !== "" && cell.dataset.value !== undefined ? Number(cell.dataset.value) : null);

  const inDigits = (value) => value?.toLocaleString(undefined, { maximumSignificantDigits: 3 }) ?? "";

  const read = (table) => {
    const heads = [...table.tHead.rows[0].cells];
    const columns = heads.flatMap((head, place) => (place > 0 && head.classList.contains("number") ? [place] : []));
    const rows = [...table.tBodies[0].rows].filter((row) => row.cells[0].dataset.value !== undefined);
    rows.sort((one, other) => Number(one.cells[0].dataset.value) - Number(other.cells[0].dataset.value));
    return {
      names: columns.map((place) => heads[place].textContent.trim()),
      data: [rows.map((row) => number(row.cells[0])), ...columns.map((place) => rows.map((row) => number(row.cells[place])))],
    };
  };

  const stack = (data) => {
    const sums = data[0].map(() => 0);
    return [data[0], ...data.slice(1).map((series) => series.map((value, place) => (sums[place] += value ?? 0)))];
  };

  const draw = (box) => {
    const table = box.parentElement.querySelector("table:not(.u-legend)"); // the chart's legend is one, too
    const { names, data } = read(table);
    box.replaceChildren();
    box.hidden = data[0].length < 2 || names.length === 0;
    if (box.hidden) table.closest("details")?.setAttribute("open", "");
    if (box.hidden) return;
    const isStacked = box.dataset.chart === "stacked", isBars = isStacked || box.dataset.chart === "bars";
    const isTime = box.dataset.x === "time", unit = box.dataset.unit;
    const shown = isStacked ? stack(data) : data;
    const series = names.map((label, place) => ({
      label, width: isBars ? 0 : 2, stroke: colour(`--tblr-${NAMES[place % NAMES.length]}`),
      fill: isBars ? colour(`--tblr-${NAMES[place % NAMES.length]}`) : undefined,
      paths: isBars ? uPlot.paths.bars({ size: [0.8, 60] }) : undefined,
      points: { show: !isBars && data[0].length < 60 },
      // Without a pointer on the chart the legend has names alone.
      value: (_, value, of, index) => (index === null ? "" : data[place + 1][index]?.toLocaleString() ?? "–"),
    }));
    // The highest of a stack is drawn first, so that the others stay in front of it.
    const order = isStacked ? series.map((_, place) => place).reverse() : series.map((_, place) => place);
    const half = isBars ? (data[0].at(-1) - data[0][0]) / (data[0].length - 1) / 2 : 0;
    const plot = new uPlot({
      width: box.clientWidth, height: 240, padding: [8, 48, null, null],
      scales: { x: { time: isTime, range: (_, least, most) => [least - half, most + half] } },
      series: [{ label: "", value: (_, x) => (x === null ? "" : isTime ? new Date(x * 1000).toLocaleString() : String(x)) },
        ...order.map((place) => series[place])],
      axes: [{ ...axis(), space: 90 }, { ...axis(), values: (_, ticks) => ticks.map((tick) => (unit === "$" ? `$${inDigits(tick)}` : inDigits(tick))) }],
    }, [shown[0], ...order.map((place) => shown[place + 1])], box);
    box.querySelectorAll(".u-legend .u-series").forEach((row, place) => { row.style.order = place ? order[place - 1] : -1; });
    if (unit && unit !== "$") box.prepend(Object.assign(document.createElement("div"), { className: "hint", textContent: unit }));
    new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height: 240 })).observe(box);
  };

  const drawAll = () => document.querySelectorAll("[data-chart]").forEach(draw);
  drawAll();
  addEventListener("theme", drawAll);
  // Tables that a live page swaps are drawn anew.
  document.addEventListener("htmx:after:swap", (event) => {
    event.target.querySelectorAll?.("[data-chart]").forEach(draw);
  });
})();
