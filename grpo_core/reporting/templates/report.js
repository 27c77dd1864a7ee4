for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const { width, x, plane, series } = JSON.parse(figure.querySelector("script").textContent);
  const tip = document.createElement("div");
  tip.className = "tip"; tip.hidden = true; figure.append(tip);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    const wanted = x[0] + (at - plane[0]) / (plane[1] - plane[0]) * (x[1] - x[0]);
    const lines = [];
    let step = null;
    for (const [name, steps, values] of series) {
      let near = 0;
      steps.forEach((s, i) => { if (Math.abs(s - wanted) < Math.abs(steps[near] - wanted)) near = i; });
      if (step === null) step = steps[near];
      lines.push(name + (steps[near] === step ? "" : " (step " + steps[near] + ")") + "  " + values[near]);
    }
    const place = plane[0] + (step - x[0]) / (x[1] - x[0]) * (plane[1] - plane[0]);
    cursor.setAttribute("x1", place); cursor.setAttribute("x2", place);
    cursor.style.visibility = "visible";
    tip.textContent = ["step " + step, ...lines].join("\n");
    tip.style.right = place > width / 2 ? "auto" : "14px";
    tip.style.left = place > width / 2 ? "56px" : "auto";
    tip.hidden = false;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.style.visibility = "hidden"; });
}
