for (const [number, figure] of document.querySelectorAll("figure").entries()) {
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const { width, x, plane, series } = JSON.parse(figure.querySelector("script").textContent);
  const tip = document.createElement("div");
  tip.className = "tip"; tip.hidden = true; tip.setAttribute("role", "status"); figure.append(tip);
  let step = null, shown = x;  // the step that is read, and the range of steps that is drawn
  const stepAt = at => shown[0] + (at - plane[0]) / (plane[1] - plane[0]) * (shown[1] - shown[0]);
  const place = at => plane[0] + (at - shown[0]) / (shown[1] - shown[0]) * (plane[1] - plane[0]);
  function read(wanted) {  // show the values of the step that is nearest
    const lines = [];
    step = null;
    for (const [name, steps, values] of series) {
      let near = 0;
      steps.forEach((s, i) => { if (Math.abs(s - wanted) < Math.abs(steps[near] - wanted)) near = i; });
      if (step === null) step = steps[near];
      lines.push(name + (steps[near] === step ? "" : " (step " + steps[near] + ")") + "  " + values[near]);
    }
    const at = place(step);
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at);
    cursor.style.visibility = step < shown[0] || step > shown[1] ? "hidden" : "visible";
    tip.textContent = ["step " + step, ...lines].join("\n");
    tip.style.right = at > width / 2 ? "auto" : "14px";
    tip.style.left = at > width / 2 ? "56px" : "auto";
    tip.hidden = false;
  }
  function leave() { tip.hidden = true; cursor.style.visibility = "hidden"; }
  function under(event) {  // the step under the pointer
    const box = svg.getBoundingClientRect();
    return stepAt((event.clientX - box.left) / box.width * width);
  }

  // The zoom.  What is drawn has its places in the whole range of steps; they are moved, and clipped.
  const plot = svg.querySelector(".plot"), ticks = svg.querySelector(".steps"), everywhere = ticks.innerHTML;
  const drawn = [...plot.children].flatMap(one =>
    ["d", "cx", "x"].filter(name => one.hasAttribute(name)).map(name => [one, name, one.getAttribute(name)]));
  const height = svg.viewBox.baseVal.height, store = `zoom ${location.pathname} ${svg.getAttribute("aria-label")}`;
  svg.insertAdjacentHTML("beforeend", `<clipPath id="plot-${number}"><rect x="${plane[0]}" width="${plane[1] - plane[0]}" height="${height}"/></clipPath><rect class="chosen" y="10" height="${height - 34}"/>`);
  const chosen = svg.querySelector(".chosen"), buttons = document.createElement("div");
  function zoom(from, to) {  // show these steps, as far as there are so many
    const whole = x[1] - x[0], span = Math.min(Math.max(to - from, 2), whole);
    const first = Math.min(Math.max((from + to - span) / 2, x[0]), x[1] - span), all = span === whole;
    shown = [first, first + span];
    const moved = at => place(x[0] + (at - plane[0]) / (plane[1] - plane[0]) * whole).toFixed(1);
    for (const [one, name, value] of drawn)
      one.setAttribute(name, all ? value : name === "d" ? value.replace(/([ML])(\S+) /g, (_, pen, at) => `${pen}${moved(at)} `) : moved(value));
    all ? plot.removeAttribute("clip-path") : plot.setAttribute("clip-path", `url(#plot-${number})`);
    ticks.innerHTML = everywhere;
    if (!all) {
      const power = 10 ** Math.floor(Math.log10(span / 6)), every = Math.max(1, [1, 2, 5, 10].map(n => n * power).find(n => n >= span / 6));
      const labels = [];
      for (let at = Math.ceil(first / every) * every; at <= shown[1]; at += every)
        if (place(at) > plane[0] + 8) labels.push(`<text x="${place(at).toFixed(1)}" y="${height - 6}" text-anchor="middle">${at}</text>`);
      ticks.innerHTML = labels.join("");
    }
    buttons.querySelectorAll("button").forEach((button, index) => { button.disabled = index ? all : span <= 2; });
    try { sessionStorage.setItem(store, JSON.stringify(all ? null : shown)); } catch { /* without a store */ }
  }
  function scale(factor) {  // around the step that is read
    const at = step !== null && !tip.hidden ? step : (shown[0] + shown[1]) / 2, half = (shown[1] - shown[0]) * factor / 2;
    zoom(at - half, at + half);
    if (!tip.hidden) read(step);
  }
  const acts = { "+": () => scale(.5), "-": () => scale(2), 0: () => { zoom(...x); leave(); } };
  buttons.className = "zoom";
  for (const [sign, title] of [["+", "zoom in"], ["-", "zoom out"], ["0", "show all steps"]]) {
    const button = document.createElement("button");
    button.textContent = { "-": "−", 0: "all" }[sign] || sign; button.title = `${title}, key ${sign}`; button.tabIndex = -1;  // the keys do the same
    button.setAttribute("aria-label", title);
    button.addEventListener("click", acts[sign]);
    buttons.append(button);
  }
  if (x[1] - x[0] > 2) figure.append(buttons);
  let start = null;
  svg.addEventListener("pointerdown", event => {
    if (event.pointerType !== "mouse" || event.button) return;  // a finger reads and scrolls
    start = under(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", event => {
    const at = under(event);
    read(at);
    const ends = start === null ? [0, 0] : [start, at].map(each => place(Math.min(Math.max(each, shown[0]), shown[1]))).sort((a, b) => a - b);
    chosen.setAttribute("x", ends[0]); chosen.setAttribute("width", ends[1] - ends[0]);
  });
  svg.addEventListener("pointerup", () => {
    const from = Number(chosen.getAttribute("x")), across = Number(chosen.getAttribute("width"));
    if (start !== null && across > 8) { zoom(stepAt(from), stepAt(from + across)); leave(); }
    start = null; chosen.setAttribute("width", 0);
  });
  svg.addEventListener("dblclick", acts[0]);
  let kept = null;
  try { kept = location.protocol !== "file:" && JSON.parse(sessionStorage.getItem(store)); } catch { /* without a store */ }
  zoom(...(kept || x));
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", event => {
    const steps = series[0][1], at = steps.indexOf(step);
    const to = { ArrowRight: Math.min(at + 1, steps.length - 1), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: steps.length - 1 }[event.key];
    const act = acts[{ "=": "+", Escape: 0 }[event.key] ?? event.key];
    if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
    if (to === undefined) return;
    event.preventDefault();
    const half = (shown[1] - shown[0]) / 2;
    if (steps[to] < shown[0] || steps[to] > shown[1]) zoom(steps[to] - half, steps[to] + half);
    read(steps[to]);
  });
}

// The menu.  It sets no fragment: a served page with one would not be loaded again by itself.
const menu = document.querySelector("nav");
for (const heading of document.querySelectorAll("h2")) {
  const name = heading.firstChild.textContent.trim(), link = document.createElement("a");
  heading.id = link.textContent = name;
  link.href = "#" + encodeURIComponent(name);
  link.addEventListener("click", event => { event.preventDefault(); heading.scrollIntoView(); });
  menu.append(link);
}

// The browser of rollouts.  Texts of the run become text nodes only.
const browser = document.querySelector("#browser");
if (browser) browse(browser);

function browse(root) {
  const { groups, pieces, runs = [] } = JSON.parse(root.querySelector("script").textContent);
  groups.sort((a, b) => b.step - a.step);  // the newest first
  const form = root.querySelector("form"), list = root.querySelector(".list"), pane = root.querySelector(".pane");
  const count = root.querySelector("output"), more = root.querySelector(".more");
  const fields = [...(runs.length ? ["run", "shared"] : []), "set", "task", "finish", "from", "to", "low", "high", "text"];
  // A prompt of another run is the same one if its messages are the same, too: its environment may have other options.
  for (const group of groups) group.same = JSON.stringify([group.task, group.prompt, ...(runs.length ? group.messages : [])]);
  const rollouts = groups.flatMap(group => group.rollouts.map(one => ({
    ...one, of: group, key: `${runs.length ? `${group.run}.` : ""}${group.set[0]}${group.step}.${group.group}.${one.place || 0}` })));
  const played = new Map();  // the runs that played a prompt
  for (const group of groups) played.set(group.same, new Set([...(played.get(group.same) || []), group.run]));
  const byRun = one => runs.length ? `${runs[one.of.run]}: ` : "";
  const byKey = new Map(rollouts.map(one => [one.key, one]));
  const state = restored();
  let found = [], shown = 0, read = state.show;

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children.filter(child => child !== ""));
    return made;
  }
  function restored() {
    const given = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
    let kept = {};
    try { kept = JSON.parse(sessionStorage.getItem(location.pathname)) || {}; } catch { /* without a store */ }
    return { colour: "logprob", ...([...given].length ? Object.fromEntries(given) : kept) };
  }
  function keep() {
    const told = Object.fromEntries(Object.entries(state).filter(([, value]) => value !== ""));
    try { sessionStorage.setItem(location.pathname, JSON.stringify(told)); } catch { /* without a store */ }
    // A served page is loaded again by itself, which a browser does not do for an address with a fragment.
    const fragment = location.protocol === "file:" ? "#" + new URLSearchParams(told) : location.pathname;
    try { history.replaceState(null, "", fragment); } catch { /* too often */ }
  }
  const plain = value => value === undefined ? "-" : String(Math.round(value * 1e4) / 1e4);
  const said = message => [message.thoughts, message.text, ...(message.calls || []).flat()].filter(Boolean).join(" ");
  const words = one => one.words ??= [one.of.prompt, one.of.answer, one.answer, one.error,
    ...one.of.messages.map(said), ...one.messages.map(said)].filter(Boolean).join("\n").toLowerCase();

  // ------------------------------------------------------------------------------- filters
  if (runs.length) runs.forEach((name, run) => form.elements.run.append(new Option(name, run)));
  for (const [name, values] of [["set", rollouts.map(one => one.of.set)], ["task", rollouts.map(one => one.of.task)],
                                ["finish", rollouts.map(one => one.finish || "")]])
    for (const value of [...new Set(values)].sort()) form.elements[name].append(new Option(value || "none", value || "none"));
  for (const name of fields) form.elements[name].value = state[name] ?? "";
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));
  form.addEventListener("input", filter);

  function filter() {
    for (const name of fields) state[name] = form.elements[name].value;
    const number = name => state[name] === "" ? null : Number(state[name]);
    const [from, to, low, high] = ["from", "to", "low", "high"].map(number), text = state.text.toLowerCase();
    found = rollouts.filter(one =>
      (!state.run || String(one.of.run) === state.run) && (!state.shared || played.get(one.of.same).size > 1)
      && (!state.set || one.of.set === state.set) && (!state.task || one.of.task === state.task)
      && (!state.finish || (one.finish || "none") === state.finish)
      && (from === null || one.of.step >= from) && (to === null || one.of.step <= to)
      && (low === null || one.reward >= low) && (high === null || one.reward <= high)
      && (!text || words(one).includes(text)));
    count.textContent = `${found.length.toLocaleString("en")} of ${rollouts.length.toLocaleString("en")} rollouts`;
    list.replaceChildren();
    shown = 0;
    extend();
    keep();
    if (!found.some(one => one.key === read)) choose(found[0]);
  }
  function choose(one) {  // what nobody has clicked is not kept, so that a page that is loaded again shows the newest
    show(one?.key, counterpart(one), false);
  }
  function extend() {
    for (const one of found.slice(shown, shown + 100)) list.append(entry(one));
    shown = Math.min(found.length, shown + 100);
    more.hidden = shown === found.length;
    mark();
  }
  function entry(one) {
    const last = one.messages.at(-1) || {};
    const button = element("button", { type: "button", "data-key": one.key },
      element("span", { class: "where" }, `${runs.length ? `${runs[one.of.run].split(" ")[0]} ` : ""}${one.of.set === "validation" ? "validation " : "step "}${one.of.step}`),
      element("b", {}, plain(one.reward)),
      element("span", { class: "dim" }, [one.of.task, one.finish, one.length === undefined ? "" : `${one.length} tokens`].filter(Boolean).join(" · ")),
      element("span", { class: "snippet" }, (said(last) || "no text").slice(0, 160)));
    button.addEventListener("click", () => { show(one.key, counterpart(one)); if (innerWidth < 900) pane.scrollIntoView(); });
    return element("li", {}, button);
  }
  function mark() {
    for (const button of list.querySelectorAll("button"))
      button.dataset.key === read ? button.setAttribute("aria-current", "true") : button.removeAttribute("aria-current");
  }
  more.addEventListener("click", () => {
    const next = shown;
    extend();
    list.children[next]?.firstChild.focus();
  });
  list.addEventListener("keydown", event => {
    const item = document.activeElement.parentElement;
    const next = { ArrowDown: item.nextSibling, ArrowUp: item.previousSibling }[event.key];
    if (next?.firstChild?.focus) { event.preventDefault(); next.firstChild.focus(); }
  });

  // ------------------------------------------------------------------------------- one rollout
  function show(key, other = "", chosen = true) {
    const one = byKey.get(key), beside = one && byKey.has(other) ? other : "";
    read = one ? key : "";
    state.show = chosen ? read : "";
    state.beside = chosen ? beside : "";
    mark();
    keep();
    if (!one) { pane.replaceChildren(element("p", { class: "dim" }, "Choose a rollout to read it.")); return; }
    pane.replaceChildren(versions(one, beside), element("div", { class: beside ? "two" : "" },
      card(one), ...(beside ? [card(byKey.get(beside))] : [])));
  }
  const same = one => rollouts.filter(each => each.of.same === one.of.same);
  function counterpart(one) {  // of another run, from the nearest step
    const others = one && runs.length ? same(one).filter(each => each.of.run !== one.of.run && each.of.set === one.of.set) : [];
    const far = each => Math.abs(each.of.step - one.of.step);
    return others.sort((a, b) => far(a) - far(b))[0]?.key || "";
  }

  function versions(one, beside) {
    const others = same(one), rounds = new Map();
    for (const each of others) {
      const name = byRun(each) + `${each.of.set === "validation" ? "validation of version" : "step"} ${each.of.step}`
        + (each.of.set === "training" && each.of.version !== undefined && each.of.version !== null ? `, generated from version ${each.of.version}` : "");
      rounds.set(name, [...(rounds.get(name) || []), each]);
    }
    const select = element("select", {}, new Option("nothing", ""));
    for (const [name, its] of rounds) {
      const box = element("optgroup", { label: name });
      for (const each of its) if (each !== one)
        box.append(new Option(`${byRun(each)}${each.of.set === "validation" ? "validation" : "step"} ${each.of.step}, rollout ${(each.place || 0) + 1}: reward ${plain(each.reward)}`, each.key, false, each.key === beside));
      if (box.children.length) select.append(box);
    }
    select.addEventListener("change", () => show(one.key, select.value));
    const means = [...rounds].map(([name, its]) => {
      const rewards = its.map(each => each.reward).filter(value => value !== undefined);
      const mean = rewards.length ? plain(rewards.reduce((sum, value) => sum + value, 0) / rewards.length) : "-";
      return element("li", {}, `${name}: mean reward ${mean} of ${its.length} rollout${its.length > 1 ? "s" : ""} on this page`);
    });
    return element("div", { class: "compare" }, element("label", {}, "Compare on the same prompt with ", select),
      element("details", {}, element("summary", { class: "dim" }, `${rounds.size} time${rounds.size > 1 ? "s" : ""} this prompt was played`), element("ul", {}, ...means)));
  }

  function card(one) {
    const facts = [["reward", plain(one.reward)], ["advantage", plain(one.advantage)], ["success", { true: "yes", false: "no" }[one.success] ?? "-"],
      ["finish reason", one.finish || "-"], ["turns", plain(one.turns)], ["calls of tools", plain(one.calls)], ["tokens", plain(one.length)],
      ["generated from version", one.of.version ?? "-"], ["trained", one.trained ? "yes" : "no"],
      ...Object.entries(one.metrics || {}).map(([name, value]) => [name, plain(value ?? undefined)])];
    const told = element("dl", {});
    for (const [name, value] of facts) told.append(element("div", {}, element("dt", {}, name), element("dd", {}, String(value))));
    const box = element("article", { class: "rollout" },
      element("h3", {}, `${byRun(one)}${one.of.set === "validation" ? "Validation of version" : "Step"} ${one.of.step}, rollout ${(one.place || 0) + 1}`,
        element("span", { class: "note" }, ` ${one.of.task} · prompt ${one.of.prompt}`)), told);
    if (one.error) box.append(element("p", { class: "told bad" }, "error: ", one.error));
    for (const message of [...(one.whole ? [] : one.of.messages), ...one.messages]) box.append(spoken(message));
    if (one.answer) box.append(element("p", {}, element("span", { class: "dim" }, "answer of the rollout "), element("code", {}, one.answer)));
    if (one.hint) box.append(element("p", {}, element("span", { class: "dim" }, "hint, which the policy did not see "), element("code", {}, one.hint)));
    if (one.of.answer) box.append(element("p", {}, element("span", { class: "dim" }, "expected answer "), element("code", {}, one.of.answer)));
    box.append(tokens(one));
    return box;
  }
  function spoken(message) {
    const box = element("div", { class: "message " + (["user", "assistant", "tool", "system"].includes(message.role) ? message.role : "other") },
      element("span", { class: "role" }, message.role || "message", message.name ? ` ${message.name}` : ""));
    if (message.thoughts) box.append(element("details", { open: "" }, element("summary", {}, "reasoning"), element("pre", {}, message.thoughts)));
    if (message.text) box.append(element("pre", {}, message.text));
    for (const [name, given] of message.calls || []) box.append(element("pre", { class: "call" }, `calls ${name} ${given}`));
    if (box.children.length === 1) box.append(element("p", { class: "dim" }, "no text"));
    return box;
  }

  // ------------------------------------------------------------------------------- tokens
  const scales = {
    logprob: { title: "logprob of each token when the engine sampled it", legend: ["above -0.1", "-0.1 to -0.5", "-0.5 to -1", "-1 to -2", "-2 to -4", "below -4"],
      level: token => token.logprob === null ? "x" : [0.1, 0.5, 1, 2, 4, Infinity].findIndex(end => -token.logprob <= end) },
    advantage: { title: "advantage with which each token was trained", legend: ["0", "above 0", "1 and more", "below 0", "-1 and less"],
      level: token => token.advantage === null ? "x" : token.advantage === 0 ? 0 : (token.advantage > 0 ? 1 : 3) + (Math.abs(token.advantage) >= 1 ? 1 : 0) },
    version: { title: "version of the weights that sampled each token", legend: [], level: token => token.version === null ? "x" : token.order % 4 },
    mask: { title: "which tokens the engine sampled; only these are trained", legend: ["sampled"], level: token => token.sampled ? 0 : "x" },
  };
  function unpacked(one) {
    const given = one.tokens, numbers = text => {
      const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
      return Array.from({ length: bytes.length / 2 }, (_, i) => bytes[2 * i] | bytes[2 * i + 1] << 8);
    };
    const ids = numbers(given.ids), logprobs = numbers(given.logprobs), sampled = [];
    given.mask.forEach((length, run) => { for (let i = 0; i < length; i++) sampled.push(run % 2 === 1); });
    const spread = runs => { const all = []; for (let i = 0; i < runs.length; i += 2) for (let n = 0; n < runs[i + 1]; n++) all.push(runs[i]); return all; };
    const versions = spread(given.versions), advantages = given.advantages && spread(given.advantages);
    const orders = [...new Set(versions)].sort((a, b) => a - b), starts = new Set();
    given.segments.slice(0, -1).reduce((sum, length) => { starts.add(sum + length); return sum + length; }, 0);
    let place = -1;
    return { orders, all: ids.map((id, i) => {
      if (sampled[i]) place++;
      return { text: pieces[id], sampled: sampled[i], start: starts.has(i), logprob: sampled[i] ? -logprobs[i] / 1000 : null,
        version: sampled[i] ? versions[place] : null, order: orders.indexOf(versions[place]),
        advantage: sampled[i] ? (advantages ? advantages[place] : one.advantage ?? null) : null };
    }) };
  }
  function tokens(one) {
    const box = element("section", { class: "tokens" }, element("h4", {}, "Tokens"));
    if (!one.tokens) {
      box.append(element("p", { class: "dim" }, { none: "The run stored no tokens of this rollout.",
        room: "The tokens of this rollout are not on this page, which has room for some only; the run has stored them.",
        damaged: "The tokens of this rollout are stored, and cannot be read." }[one.untold]));
      return box;
    }
    const { all, orders } = unpacked(one), field = element("fieldset", {}, element("legend", { class: "dim" }, "coloured by"));
    const text = element("pre", { class: "coloured", tabindex: "0", role: "group", "aria-label": "tokens; the arrow keys go through them" });
    const legend = element("div", { class: "legend" }), reading = element("p", { class: "reading", "aria-live": "polite" }, "Point at a token, or go there with the arrow keys, to read its numbers.");
    let at = -1;
    function paint() {
      const scale = scales[state.colour] || scales.logprob, name = scales[state.colour] ? state.colour : "logprob";
      const labels = name === "version" ? orders.map(version => `version ${version}`) : scale.legend;
      legend.replaceChildren(element("span", {}, scale.title + ":"), ...labels.map((label, i) => element("span", {}, element("i", { class: `${name}-${name === "version" ? i % 4 : i}` }, "ab"), label)),
        element("span", {}, element("i", { class: "unsampled" }, "ab"), "not sampled by the engine"));
      if (name === "advantage" && all.every(token => token.advantage === null)) legend.append(element("span", {}, "This rollout has no advantage: it was masked, filtered or played for a validation."));
      text.replaceChildren();
      all.forEach((token, i) => {
        if (token.start) text.append(element("span", { class: "cut" }, "\n— next segment —\n"));
        const level = scale.level(token), span = element("span", { class: token.sampled ? `${name}-${level}` : "unsampled" }, token.text);
        if (name === "version" && token.sampled && (i === 0 || all[i - 1].version !== token.version)) span.prepend(element("sup", {}, String(token.version)));
        span.place = i;
        text.append(span);
      });
    }
    function read(place) {
      if (place < 0 || place >= all.length) return;
      at = place;
      text.querySelector(".here")?.classList.remove("here");
      const token = all[place];
      [...text.children].find(span => span.place === place)?.classList.add("here");
      reading.textContent = `token ${place + 1} of ${all.length}, ${JSON.stringify(token.text)}: ` + (token.sampled
        ? `logprob ${token.logprob <= -65.535 ? "-65.5 or less" : token.logprob}, advantage ${plain(token.advantage ?? undefined)}, version ${token.version}` : "not sampled by the engine, so it has no logprob and is not trained");
    }
    for (const name of Object.keys(scales)) {
      const radio = element("input", { type: "radio", name: `colour-${one.key}`, value: name });
      radio.checked = name === state.colour;
      radio.addEventListener("change", () => { state.colour = name; keep(); paint(); });
      field.append(element("label", {}, radio, name));
    }
    text.addEventListener("pointerover", event => { if (event.target.place !== undefined) read(event.target.place); });
    text.addEventListener("keydown", event => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
      if (to !== undefined) { event.preventDefault(); read(to); }
    });
    paint();
    box.append(field, legend, text, reading);
    return box;
  }

  // ------------------------------------------------------------- the newest validation, or the newest step
  const ends = document.querySelector(".ends"), scored = rollouts.filter(one => one.reward !== undefined);
  const last = scored.find(one => one.of.set === "validation") || scored[0];
  if (ends && last) {
    const newest = scored.filter(one => one.of.set === last.of.set && one.of.step === last.of.step).sort((a, b) => b.reward - a.reward);
    ends.append(element("h3", {}, `Best and worst of the newest ${last.of.set === "validation" ? "validation, version" : "step,"} ${last.of.step}`));
    const tasks = [...new Set(newest.map(one => one.of.task))].sort();
    if (tasks.length > 1 || ends.parentElement.children.length % 2) ends.classList.add("wide"); // alone in its row
    for (const task of tasks) {
      const its = newest.filter(one => one.of.task === task), alike = its[0].reward === its.at(-1).reward;
      for (const [name, one] of alike ? [["all alike", its[0]]] : [["best", its[0]], ["worst", its.at(-1)]]) ends.append(end(name, one));
    }
    ends.hidden = false;
  }
  function end(name, one) {
    const first = scored.findLast(other => other.of.set === one.of.set && other.of.same === one.of.same && other.of.step < one.of.step);
    const asked = one.of.messages.at(-1), read = element("button", { type: "button" }, "read");
    read.addEventListener("click", () => { form.reset(); setTimeout(() => { show(one.key); pane.scrollIntoView(); }); });
    const text = value => element("pre", { dir: "auto" }, value.length > 700 ? `${value.slice(0, 350)} … ${value.slice(-350)}` : value || "no text");
    const reply = of => element("div", { class: "message assistant" }, text(said(of.messages.at(-1) || {})));
    return element("div", {}, element("p", {}, element("b", {}, `${one.of.task}, ${name}: reward ${plain(one.reward)} `), read),
      asked ? text(said(asked)) : "", reply(one),
      first ? element("p", { class: "dim" }, `at step ${first.of.step}: reward ${plain(first.reward)}`) : "", first ? reply(first) : "",
      one.of.answer ? element("p", { class: "dim" }, "expected ", element("code", {}, one.of.answer.slice(0, 200))) : "");
  }

  root.hidden = false;
  if (byKey.has(read)) show(read, state.beside);
  filter();
  addEventListener("hashchange", () => { if (location.hash.includes("=")) location.reload(); });
  if (location.protocol !== "file:") {  // the page is loaded again while somebody reads it
    const place = Number(sessionStorage.getItem("scrolled"));
    if (place) scrollTo(0, place);
    addEventListener("pagehide", () => sessionStorage.setItem("scrolled", String(scrollY)));
  }
}
