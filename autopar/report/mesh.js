(function () {
  "use strict";
  /* The number of the part that a rank holds: its coordinate along each axis times the axis's stride, dim by dim. */
  function coordinates(rank, axes) {
    const found = [];
    for (let axis = axes.length - 1; axis >= 0; axis--) { found.unshift(rank % axes[axis][1]); rank = Math.floor(rank / axes[axis][1]); }
    return found;
  }
  function parts(place, at) { return place.map(dim => dim.strides.reduce((sum, stride, axis) => sum + stride * at[axis], 0)); }
  function draw_mesh(root) {
    const canvas = root.querySelector("canvas.mesh"), mesh = JSON.parse(root.querySelector("script[type='application/json']").textContent).mesh;
    if (!canvas) return;
    const pick = root.querySelector("select[name=way]"), said = root.querySelector(".where"), top = 20, left = 20, gap = 10;
    let cell = 0;
    function colour(part, count) {
      const at = (count < 2 ? .5 : part / (count - 1)) * (mesh.colours.length - 1), low = Math.floor(at), high = Math.ceil(at), share = at - low;
      const mixed = [1, 3, 5].map(place => { const [one, other] = [low, high].map(stop => parseInt(mesh.colours[stop][0].slice(place, place + 2), 16)); return Math.round(one + share * (other - one)); });
      return ["rgb(" + mixed.join(",") + ")", mesh.colours[Math.round(at)][1]];
    }
    function held(way, rank) {
      const at = coordinates(rank, mesh.axes), found = parts(way.place, at);
      return {at, found, part: way.place.reduce((sum, dim, index) => sum * dim.parts + found[index], 0)};
    }
    function corner(rank) {
      const row = Math.floor(rank / mesh.across), block = Math.floor(row / mesh.down);
      return [left + block * (mesh.across * cell + gap) + rank % mesh.across * cell, top + (row - block * mesh.down) * cell];
    }
    function draw() {
      const width = canvas.clientWidth, way = mesh.ways[pick.value], ratio = window.devicePixelRatio || 1;
      if (!width) return;
      cell = Math.max(2, Math.min(30, Math.floor(560 / mesh.down), Math.floor((width - left - 2 - (mesh.blocks - 1) * gap) / (mesh.blocks * mesh.across))));
      const height = top + mesh.down * cell + 3, style = name => getComputedStyle(root).getPropertyValue("--" + name);
      canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
      const pen = canvas.getContext("2d"), count = way.place.reduce((all, dim) => all * dim.parts, 1), last = mesh.axes[mesh.axes.length - 1][0];
      pen.scale(ratio, ratio); pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle"; pen.fillStyle = style("note");
      pen.fillText(last + " \u2192", left, 9);
      if (mesh.axes.length > 1) {
        pen.save(); pen.translate(9, top); pen.rotate(Math.PI / 2); pen.fillText(mesh.axes.slice(0, -1).map(axis => axis[0]).join(" x ") + " \u2192", 0, 0); pen.restore();
      }
      pen.textAlign = "center"; pen.font = "10px ui-monospace, monospace";
      for (let rank = 0; rank < mesh.ranks; rank++) {
        const [x, y] = corner(rank), {part} = held(way, rank), [fill, ink] = colour(part, count), inset = cell > 6 ? 1 : 0;
        pen.fillStyle = fill; pen.fillRect(x, y, cell - inset, cell - inset);
        if (cell >= 20) { pen.fillStyle = ink; pen.fillText(count > 1 ? part : "all", x + cell / 2, y + cell / 2); }
      }
      pen.strokeStyle = style("ink"); pen.lineWidth = cell > 6 ? 2 : 1; pen.beginPath();
      const node = rank => rank < 0 || rank >= mesh.ranks ? -1 : Math.floor(rank / mesh.perNode);
      for (let rank = 0; rank < mesh.ranks && cell > 3; rank++) {
        const [x, y] = corner(rank), own = node(rank), row = Math.floor(rank / mesh.across), column = rank % mesh.across;
        const edge = (other, line) => { if (other !== own) { pen.moveTo(line[0], line[1]); pen.lineTo(line[2], line[3]); } };
        edge(column ? node(rank - 1) : -1, [x - .5, y - .5, x - .5, y + cell - .5]);
        edge(column < mesh.across - 1 ? node(rank + 1) : -1, [x + cell - .5, y - .5, x + cell - .5, y + cell - .5]);
        edge(row % mesh.down ? node(rank - mesh.across) : -1, [x - .5, y - .5, x + cell - .5, y - .5]);
        edge((row + 1) % mesh.down ? node(rank + mesh.across) : -1, [x - .5, y + cell - .5, x + cell - .5, y + cell - .5]);
      }
      pen.stroke();
      said.textContent = way.title + ", " + way.shape + ", " + way.spec + ": " + (count > 1 ? count + " parts, equal numbers and colours are the same part" : "whole on every rank") + ".";
    }
    function tell(event) {
      const way = mesh.ways[pick.value];
      for (let block = 0; block < mesh.blocks; block++) {
        const column = Math.floor((event.offsetX - left - block * (mesh.across * cell + gap)) / cell), row = Math.floor((event.offsetY - top) / cell);
        const rank = (block * mesh.down + row) * mesh.across + column;
        if (column < 0 || column >= mesh.across || row < 0 || row >= mesh.down || rank >= mesh.ranks) continue;
        const {at, found} = held(way, rank);
        const slices = way.place.map((dim, index) => {
          const size = Math.ceil(dim.extent / dim.parts), begin = Math.min(dim.extent, found[index] * size);
          return "dim " + dim.dim + ": " + (dim.blocks ? "part " + found[index] + " of each block" : begin + " to " + Math.min(dim.extent, begin + size));
        });
        said.textContent = "rank " + rank + " (" + mesh.axes.map((axis, index) => axis[0] + "=" + at[index]).join(", ") + "), node " + Math.floor(rank / mesh.perNode) + ": " + (slices.join(", ") || "all of it");
      }
    }
    canvas.addEventListener("pointermove", tell); canvas.addEventListener("pointerdown", tell); pick.addEventListener("change", draw);
    root.querySelectorAll("button[name=way]").forEach(button => button.addEventListener("click", () => { pick.value = button.value; draw(); canvas.scrollIntoView({block: "center"}); }));
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw); window.addEventListener("resize", draw);
    if (root.closest("details")) root.closest("details").addEventListener("toggle", draw);
    draw();
  }
  document.querySelectorAll(".planned").forEach(draw_mesh);
})();
