// Each chart's values, read by pointer, finger or arrow keys. Without this script the page is complete but for that.
for (const figure of document.querySelectorAll(".chart")) {
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const area = figure.querySelector(".area"), tip = figure.querySelector(".tip"), cursor = figure.querySelector(".cursor");
  const curves = chart.series.filter((one) => one.style !== "level" && one.points.length);
  const steps = [...new Set(curves.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
  const nearest = (wanted, values) =>
    values.reduce((best, value, at) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? at : best), 0);
  let at = 0;
  const show = (index) => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const part = (steps[at] - chart.left) / (chart.right - chart.left);
    cursor.setAttribute("d", `M${1000 * part} 0V1000`);
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: `step ${steps[at]}` }));
    for (const one of curves) {
      const [step, value] = one.points[nearest(steps[at], one.points.map((point) => point[0]))];
      const line = document.createElement("div"), bold = document.createElement("b");
      bold.textContent = value === null ? "no number" : String(Number(value.toPrecision(5)));
      line.append(bold, ` ${one.label}${step === steps[at] ? "" : `, step ${step}`}`);
      line.className = `run${one.run % 6}`;
      tip.append(line);
    }
    tip.style.left = part < 0.5 ? `calc(${100 * part}% + .5rem)` : "";
    tip.style.right = part < 0.5 ? "" : `calc(${100 * (1 - part)}% + .5rem)`;
    tip.hidden = false;
  };
  const hide = () => { tip.hidden = true; cursor.setAttribute("d", ""); };
  const point = (event) => {
    const box = area.getBoundingClientRect();
    show(nearest(chart.left + ((event.clientX - box.left) / box.width) * (chart.right - chart.left), steps));
  };
  area.addEventListener("pointermove", point);
  area.addEventListener("pointerdown", point);
  area.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { show(at + move); event.preventDefault(); }
  });
}
