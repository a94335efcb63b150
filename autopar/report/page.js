function draw_step(root) {
  "use strict";
  const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const steps = root.querySelector("canvas.steps"), memory = root.querySelector("canvas.memory");
  if (!steps || !data.end) return;
  const said = memory.nextElementSibling, panel = root.querySelector(".layer"), pick = root.querySelector("select[name=group]");
  const colours = data.colours, style = name => getComputedStyle(root).getPropertyValue("--" + name);
  const row = 26, head = 40, left = 74, most = 12;
  let from = 0, to = data.end, drag = null, moved = false, chosen = -1;

  function time(seconds) {
    for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) if (Math.abs(seconds) >= size) return +(seconds / size).toPrecision(4) + " " + unit;
    return seconds ? +(seconds * 1e9).toPrecision(3) + " ns" : "0";
  }
  function bytes(value) {
    let unit = 0;
    while (value >= 1000 && unit < 4) { value /= 1024; unit++; }
    return +value.toPrecision(3) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
  }
  function prepare(canvas, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio); pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    return pen;
  }
  function place(second, width) { return left + (second - from) / (to - from) * (width - left - 8); }
  function second(x, width) { return from + (x - left) / (width - left - 8) * (to - from); }
  function ticks(pen, width, top, bottom) {
    const rough = (to - from) / Math.max(2, (width - left) / 110), power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = power * [1, 2, 5, 10].find(n => n * power >= rough);
    pen.strokeStyle = style("line"); pen.fillStyle = style("note");
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = place(at, width);
      pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, bottom); pen.stroke(); pen.fillText(time(at), x + 3, top + 7);
    }
  }
  function draw() {
    if (!steps.clientWidth) return;
    const height = head + data.streams.length * row + 4, pen = prepare(steps, height), width = steps.clientWidth;
    ticks(pen, width, 0, height);
    pen.fillStyle = style("note"); pen.fillText("layers", 4, 27);
    for (const [name, begin, end] of data.layers) {
      if (end < from || begin > to) continue;
      const a = Math.max(place(begin, width), left), b = Math.min(place(end, width), width - 8);
      if (b <= left) continue;
      const on = data.groups[chosen] === name;
      if (on) { pen.fillStyle = style("bar"); pen.fillRect(a, 18, Math.max(b - a, 1), 17); }
      pen.strokeStyle = style("note"); pen.strokeRect(a + .5, 18.5, Math.max(b - a - 1, .5), 16);
      pen.fillStyle = style(on ? "paper" : "note");
      for (const text of [name, name.replace(/^.*\./, "")]) if (pen.measureText(text).width < b - a - 4) { pen.fillText(text, a + 3, 27); break; }
    }
    data.streams.forEach((name, number) => { pen.fillStyle = style("note"); pen.fillText(name, 4, head + number * row + row / 2); });
    const shown = {};
    for (const [stream, kind, begin, length, name] of data.bars) {
      if (begin + length < from || begin > to) continue;
      const a = Math.max(place(begin, width), left), b = Math.min(place(begin + length, width), width - 8), y = head + stream * row + 2;
      const faded = chosen >= 0 && data.names[name][4] !== chosen, spot = stream + ":" + (faded ? "" : kind) + ":" + Math.floor(a * 2);
      if (b - a < .5 && shown[spot]) continue;
      shown[spot] = true;
      pen.globalAlpha = faded ? .25 : 1; pen.fillStyle = colours[kind]; pen.fillRect(a, y, Math.max(b - a, .5), row - 4); pen.globalAlpha = 1;
      if (b - a > 60 && !faded) {
        pen.save(); pen.beginPath(); pen.rect(a, y, b - a, row - 4); pen.clip(); pen.fillStyle = data.inks[kind];
        pen.fillText(data.names[name][0], a + 3, y + row / 2 - 2); pen.restore();
      }
    }
    const tall = 150, ink = prepare(memory, tall), top = data.levels[data.peak][1], far = data.limit > 6 * top, most = (far ? top * 1.25 : Math.max(data.limit, top)) * 1.05;
    const y = value => tall - 4 - value / most * (tall - 26);
    ticks(ink, width, 0, tall);
    ink.beginPath(); ink.moveTo(place(0, width), y(0));
    let before = 0;
    for (const [at, level] of data.levels) { const x = place(at, width); ink.lineTo(x, y(before)); ink.lineTo(x, y(level)); before = level; }
    ink.lineTo(place(data.end, width), y(before)); ink.lineTo(place(data.end, width), y(0)); ink.closePath();
    ink.fillStyle = colours[0] + "66"; ink.fill();
    ink.clearRect(0, 0, left, tall); ink.fillStyle = style("note"); ink.fillText("memory", 4, 14);
    ink.strokeStyle = ink.fillStyle = style("limit");
    if (!far) { ink.setLineDash([5, 4]); ink.beginPath(); ink.moveTo(left, y(data.limit)); ink.lineTo(width, y(data.limit)); ink.stroke(); ink.setLineDash([]); }
    ink.fillText("limit " + bytes(data.limit) + (far ? ", far above" : ""), left + 4, far ? 24 : y(data.limit) + 9);
    const peak = data.levels[data.peak];
    if (peak[0] >= from && peak[0] <= to) {
      ink.fillStyle = style("ink"); ink.beginPath(); ink.arc(place(peak[0], width), y(peak[1]), 3, 0, 7); ink.fill();
      const text = "peak " + bytes(peak[1]);
      ink.fillText(text, Math.min(place(peak[0], width) + 6, width - ink.measureText(text).width - 6), Math.min(y(peak[1]) + 10, tall - 8));
    }
  }
  function zoom(factor, middle) {
    const span = Math.min(data.end, Math.max((to - from) * factor, data.end * 1e-6)), share = (middle - from) / (to - from);
    from = Math.min(Math.max(0, middle - share * span), data.end - span); to = from + span; draw();
  }
  function move(by) { const span = to - from; from = Math.min(Math.max(0, from + by), data.end - span); to = from + span; draw(); }
  function tell(x, y) {
    const at = second(x, steps.clientWidth), stream = Math.floor((y - head) / row);
    let level = data.levels[0][1];
    for (const [begin, value] of data.levels) { if (begin > at) break; level = value; }
    const found = data.bars.filter(bar => bar[0] === stream && bar[2] <= at && at <= bar[2] + bar[3]).pop();
    said.textContent = time(at) + ", " + bytes(level) + " held" + (found ? " \u2014 " + data.names[found[4]].slice(0, 4).filter(Boolean).join(", ") + ", " + time(found[3]) : "");
  }
  for (const canvas of [steps, memory]) {
    canvas.addEventListener("wheel", event => { if (!event.ctrlKey && !event.metaKey) return; event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : .8, second(event.offsetX, canvas.clientWidth)); }, {passive: false});
    canvas.addEventListener("pointerdown", event => { drag = event.offsetX; moved = false; tell(event.offsetX, event.offsetY); });
    canvas.addEventListener("pointermove", event => {
      if (drag !== null && event.buttons) { moved = moved || Math.abs(drag - event.offsetX) > 2; move((drag - event.offsetX) / (canvas.clientWidth - left) * (to - from)); drag = event.offsetX; }
      else tell(event.offsetX, canvas === steps ? event.offsetY : -1);
    });
    canvas.addEventListener("dblclick", () => { from = 0; to = data.end; draw(); });
  }
  function element(name, text, parent) { const made = document.createElement(name); made.textContent = text; parent.append(made); return made; }
  function table(title, header, rows) {
    if (!rows.length) return;
    element("h4", title, panel);
    const box = element("div", "", panel), made = element("table", "", box), top = element("tr", "", made);
    box.className = "wide"; box.tabIndex = 0; box.setAttribute("role", "region"); box.setAttribute("aria-label", title);
    header.forEach(words => { const cell = element("th", words, top); cell.scope = "col"; if (words === "seconds") cell.className = "figure"; });
    for (const cells of rows) { const line = element("tr", "", made); cells.forEach((words, place) => { const cell = element("td", words, line); if (header[place] === "seconds") cell.className = "figure"; if (header[place] === "how it lies") cell.className = "words"; }); }
  }
  function summed(bars) {
    const found = new Map();
    for (const bar of bars) { const key = bar[4] + ":" + bar[0], one = found.get(key) || [bar, 0]; one[1] += bar[3]; found.set(key, one); }
    return [...found.values()].sort((one, other) => other[1] - one[1]);
  }
  function shortened(rows, width) {
    const rest = rows.slice(most), seconds = rest.reduce((sum, one) => sum + one[1], 0);
    return [rows.slice(0, most), rest.length ? [[rest.length + " shorter", ...Array(width - 2).fill(""), time(seconds)]] : []];
  }
  function choose(group) {
    chosen = group; pick.value = group < 0 ? "" : group; panel.replaceChildren(); draw();
    if (group < 0) return;
    const own = data.bars.filter(bar => data.names[bar[4]][4] === group), is = word => bar => data.kinds[bar[1]] === word;
    element("h3", data.groups[group], panel);
    const sums = data.kinds.map((kind, place) => [data.kindNames[place], own.filter(is(kind)).reduce((sum, bar) => sum + bar[3], 0)]).filter(one => one[1]);
    element("p", sums.map(([name, seconds]) => name + " " + time(seconds)).join(", ") + ".", panel);
    const jumps = element("p", "", panel);
    for (const kind of ["forward", "backward"]) {
      const found = own.filter(is(kind));
      if (!found.length) continue;
      const button = element("button", "zoom to its " + kind, jumps); button.type = "button";
      button.addEventListener("click", () => { from = Math.min(...found.map(bar => bar[2])); to = Math.max(...found.map(bar => bar[2] + bar[3])); if (to - from < data.end * 1e-6) to = from + data.end * 1e-6; draw(); });
    }
    const operators = shortened(summed(own.filter(bar => !["moving", "stalled", "optimizer"].includes(data.kinds[bar[1]]))), 4);
    table("Operators", ["operator", "module", "phase", "seconds"], [...operators[0].map(([bar, seconds]) => [data.names[bar[4]][0], data.names[bar[4]][1], data.kindNames[bar[1]], time(seconds)]), ...operators[1]]);
    const calls = shortened(summed(own.filter(is("moving"))), 3);
    table("Collectives", ["collective", "link", "seconds"], [...calls[0].map(([bar, seconds]) => [data.names[bar[4]][0], data.streams[bar[0]], time(seconds)]), ...calls[1]]);
    const waits = shortened(summed(own.filter(is("stalled"))), 2);
    table("Waits", ["operators stand still", "seconds"], [...waits[0].map(([bar, seconds]) => [data.names[bar[4]][0], time(seconds)]), ...waits[1]]);
    const ways = data.groupWays[group].map(place => [data.mesh.ways[place], data.reasons[place]]);
    table("How its weights lie", ["weight", "how it lies", "spec"], ways.map(([way]) => [way.title, way.words, way.spec]));
    for (const [way, reason] of ways) {
      if (!reason) continue;
      const box = element("details", "", panel); element("summary", "Why " + way.title + " lies so", box); element("pre", reason, box);
    }
  }
  data.groups.forEach((name, place) => { const option = element("option", name, pick); option.value = place; });
  pick.addEventListener("change", () => choose(pick.value === "" ? -1 : +pick.value));
  steps.addEventListener("click", event => {
    if (moved) return;
    const at = second(event.offsetX, steps.clientWidth), stream = Math.floor((event.offsetY - head) / row);
    const box = event.offsetY < head ? data.layers.find(one => one[1] <= at && at <= one[2]) : null;
    const bar = box ? null : data.bars.filter(one => one[0] === stream && one[2] <= at && at <= one[2] + one[3]).pop();
    const group = box ? data.groups.indexOf(box[0]) : bar ? data.names[bar[4]][4] : -1;
    choose(group === chosen ? -1 : group);
  });
  steps.addEventListener("keydown", event => {
    const middle = (from + to) / 2, act = {"+": () => zoom(.5, middle), "=": () => zoom(.5, middle), "-": () => zoom(2, middle), "0": () => { from = 0; to = data.end; draw(); },
      Home: () => move(-data.end), End: () => move(data.end), ArrowLeft: () => move((from - to) / 3), ArrowRight: () => move((to - from) / 3), Escape: () => choose(-1)}[event.key];
    if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
  });
  window.addEventListener("pointerup", () => { drag = null; });
  if (root.closest("details")) root.closest("details").addEventListener("toggle", draw);
  root.querySelectorAll(".buttons button").forEach(button => button.addEventListener("click", () => {
    const middle = (from + to) / 2;
    ({in: () => zoom(.5, middle), out: () => zoom(2, middle), all: () => { from = 0; to = data.end; draw(); }, left: () => move((from - to) / 3), right: () => move((to - from) / 3)})[button.name]();
  }));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw); window.addEventListener("resize", draw); window.addEventListener("beforeprint", draw);
  draw();
}
document.querySelectorAll(".planned").forEach(draw_step);
