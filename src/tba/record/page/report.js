"use strict";
// Shows the data of a report: overview, curves, trajectories, what was not trained, settings.
//
// Invariant: text of the data reaches the page as text only (`textContent`), and what is shown follows from `state`,
// which the URL's hash holds: a link to the page with its hash shows the same again.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = ["#0b6fb8", "#d9601a", "#1f8a5b", "#a0468c", "#8a6d00", "#4b5563", "#c2304a", "#00858a"];
  const EVENTS = {
    evaluation: ["evaluations", "#98a2ae"], reset: ["reference resets", "#1f8a5b"], fault: ["faults", "#c2304a"],
    searcher: ["searchers that came and left", "#8a6d9c"], control: ["staleness control", "#8a6d00"],
  };
  const VIEWS = {
    overview: ["Overview", overview], curves: ["Curves", curves], read: ["Trajectories", trajectories],
    left: ["Not trained", notTrained], settings: ["Settings", settings],
  };
  const WHY = {
    waiting: "never drawn so far: still in memory, or not yet read, or not yet scored under a new reference",
    evicted: "left by the capacity rule (the oldest, or the lowest reward), or was deleted from the disk, before it was drawn",
    duplicate: "replaced by a newer copy of the same answer, or by a near duplicate, before it was drawn",
    rejected: "its reward or a log-probability was not finite, or its reward was too large: it never reached the journal",
    damaged: "was on the disk and could not be read again",
    in_flight_at_stop: "started and not finished when the run ended",
  };

  // State, in the URL's hash

  const DEFAULTS = {
    view: "overview", run: 0, unit: "trajectories", axis: data.runs.length > 1 ? "step" : "time", from: null, to: null, hide: "", metric: "",
    by: "answers", q: "", sort: "newest", searcher: "", stop: "", fate: "", step: null, prompt: null, v0: null,
    v1: null, r0: null, r1: null, l0: null, l1: null, t: null, colour: "ratio", raw: 0, s: "", differ: 0,
  };
  const NUMBERS = new Set(["run", "from", "to", "step", "prompt", "v0", "v1", "r0", "r1", "l0", "l1", "t", "raw", "differ"]);
  let state = fromHash();

  function fromHash() {
    const found = { ...DEFAULTS };
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      if (!(name in DEFAULTS)) continue;
      if (!NUMBERS.has(name)) found[name] = value;
      else if (value !== "" && Number.isFinite(Number(value))) found[name] = Number(value);
    }
    if (!VIEWS[found.view]) found.view = DEFAULTS.view;
    if (!data.runs[found.run]) found.run = 0;
    return found;
  }

  function hashOf(some) {
    const changed = Object.entries({ ...state, ...some }).filter(([name, value]) => value !== DEFAULTS[name]);
    return "#" + new URLSearchParams(changed.map(([name, value]) => [name, String(value)]));
  }

  // Change the state and its link; `draw` shows it, by default the whole view anew. Another view is a step of "back".
  function go(some, draw = render) {
    const another = some.view !== undefined && some.view !== state.view;
    history[another ? "pushState" : "replaceState"](null, "", hashOf(some));
    state = { ...state, ...some };
    draw();
    if (another) window.scrollTo(0, 0);
  }

  // Elements

  function h(tag, names, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(names || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "colour") element.style.background = value;
      else if (value !== undefined && value !== null) element[name] = value;
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
    return element;
  }

  // Control and formatting characters are spelt out: what a model said cannot rearrange the page.
  function visible(text) {
    return text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) =>
      c === "\n" || c === "\t" ? c : `\\u{${c.codePointAt(0).toString(16)}}`);
  }

  // What the data have under a name: any name may be in them, also one that every object has
  const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

  function number(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value)) return (value + 0).toLocaleString("en"); // no -0
    return String(Number(value.toPrecision(digits)));
  }
  // as the terminal has it (hundredfold of text.py): a half goes away from zero, of the decimal that floats are near
  const tenths = (share) => {
    const whole = Math.round(Number((1000 * Math.abs(share)).toFixed(8)));
    return `${share < 0 ? "-" : ""}${(whole / 10).toFixed(1)}`;
  };
  const percent = (share) => `${tenths(share)} %`;
  // "1.50" -> "step 50 of incarnation 1", as the terminal has it (Version.in_words)
  function versionInWords(version) {
    const [, incarnation, step, average] = /^(\d+)\.(\d+)(a?)$/.exec(version) || [];
    if (step === undefined) return version;
    return `${average ? "the average at " : ""}step ${step}${incarnation === "0" ? "" : ` of incarnation ${incarnation}`}`;
  }
  function seconds(value) {
    if (value === null) return "–";
    if (value < 100) return `${value.toFixed(1)} s`;
    const whole = Math.round(value), two = (n) => String(n).padStart(2, "0");
    return whole < 6000 ? `${Math.floor(whole / 60)}:${two(whole % 60)} min`
      : `${Math.floor(whole / 3600)}:${two(Math.floor((whole % 3600) / 60))} h`;
  }
  const dot = (i) => h("i", { className: "dot", colour: COLOURS[i % COLOURS.length] });
  const cell = (text, kind = "number") => h("td", { className: kind }, text);
  function table(heads, rows, kind = "plain") {
    const head = heads.map(([name, side]) => h("th", { className: side || "" }, name));
    return h("div", { className: "scroll" },
      h("table", { className: kind }, h("thead", null, h("tr", null, head)), h("tbody", null, rows)));
  }
  function choice(name, pairs, change = (value) => go({ [name]: value }), chosen = state[name]) {
    const options = pairs.map(([value, text]) => h("option", { value, selected: String(chosen) === String(value) }, text));
    return h("select", { name, title: name, onchange: (event) => change(event.target.value) }, options);
  }

  // Rewards from red over grey to green, between the lowest and the highest of the run
  function rewardColour(run, reward) {
    if (reward === null) return "#9aa5b1";
    const [low, high] = run.rewards;
    const share = high > low ? (reward - low) / (high - low) : 0.5;
    return share < 0.5 ? mix([178, 58, 72], [125, 120, 92], 2 * share) : mix([125, 120, 92], [31, 138, 91], 2 * share - 1);
  }
  const mix = (a, b, share) => `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join(",")})`;

  // The data, indexed

  data.runs.forEach((run, index) => {
    const found = run.trajectories;
    run.index = index;
    run.rewards = [0, 1];
    if (!found) return;
    run.t = found.columns;
    run.size = found.shown;
    for (const name of ["version", "stop", "fate", "reference", "sampling"]) {
      const { kinds, of } = run.t[name];
      run.t[name] = of.map((i) => (i === null ? null : kinds[i]));
      run[name + "Kinds"] = kinds;
    }
    run.step = run.t.version && run.t.version.map((version) => (version === "none" ? -1 : Number(version.split(".")[1])));
    run.byRound = grouped(run.t.round || []);
    run.byPrompt = grouped(run.t.prompt || []);
    run.byPlace = new Map((run.t.place || []).map((place, i) => [place, i]));
    const known = (run.t.reward || []).filter((reward) => reward !== null);
    if (known.length) run.rewards = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
  });

  function grouped(column) {
    const found = [];
    column.forEach((value, row) => (found[value] ||= []).push(row));
    return found;
  }

  function textOf(run, row) {
    const text = run.t.text[row];
    return text === null ? "(text is hidden)" : text === "" ? "(empty)" : visible(text);
  }
  function promptOf(run, prompt) {
    const { text, key } = run.trajectories.prompts[prompt];
    return text === undefined ? key : visible(text);
  }
  // Without what all prompts of the run begin and end with (a chat template)
  function question(run, text) {
    const [begins, ends] = run.frame;
    const rest = text.startsWith(begins) ? text.slice(begins.length) : text;
    return visible(rest.endsWith(ends) ? rest.slice(0, rest.length - ends.length) : rest);
  }
  function questionOf(run, prompt) {
    const { text, key } = run.trajectories.prompts[prompt];
    return text === undefined ? key : question(run, text);
  }

  // Frame

  const main = document.getElementById("view");
  let keys = () => false; // what the view does with a key; true: it has used it
  let charts = [];

  function render() {
    charts.forEach((chart) => chart.destroy());
    charts = [];
    keys = () => false;
    const run = data.runs[state.run], several = data.runs.length > 1;
    document.title = several ? `tba: ${data.runs.length} runs` : `tba: ${run.name}`;
    const title = several ? [h("b", null, `${data.runs.length} runs`), data.runs.map((r) => h("span", null, dot(r.index), r.name + "  "))]
      : [h("b", null, run.name), h("span", null, `${run.recipe}, ${run.steps.toLocaleString("en")} steps, ${seconds(run.wall_seconds)}`)];
    document.getElementById("title").replaceChildren(...title.flat());
    document.getElementById("tabs").replaceChildren(...Object.entries(VIEWS).map(([view, [name]]) =>
      h("a", {
        href: hashOf({ view }), className: view === state.view ? "on" : "",
        onclick: (event) => { event.preventDefault(); go({ view }); },
      }, name)));
    main.replaceChildren();
    VIEWS[state.view][1](run);
  }

  // Which run is looked at, where there are several
  function runs() {
    if (data.runs.length < 2) return null;
    return h("div", { className: "bar" }, data.runs.map((run) => h("button", {
      className: run.index === state.run ? "on" : "",
      onclick: () => go({ run: run.index, t: null, prompt: null, step: null }),
    }, dot(run.index), run.name)));
  }

  // Overview

  function overview(run) {
    const all = data.runs.flatMap((one) => one.figures.map((figure) => [one, figure]));
    const failed = data.runs.filter((one) => one.ended !== "ended");
    main.append(
      ...failed.map((one) => h("div", { className: "banner" }, `${one.name}: ${visible(one.ended)}`)),
      h("h2", null, "Before and after ", h("small", null, "held-out problems, with 95 % intervals")),
      all.length ? table(
        [...(data.runs.length > 1 ? [["run"]] : []), ["metric"], ["before", "number"], ["after", "number"], ["difference", "number"], ["", "bars"], ["problems", "number"]],
        all.map(([one, { metric, before, after }]) => h("tr", null,
          data.runs.length > 1 && h("td", null, dot(one.index), one.name),
          h("td", null, metric), cell(measured(before)), cell(measured(after)),
          cell(before && after && before.n === after.n ? `${after.value >= before.value ? "+" : ""}${tenths(after.value - before.value)} points` : "–"),
          h("td", { className: "bars" }, range(one, before, after)), cell(after && after.n !== before.n ? `${number(before.n)}, ${number(after.n)}` : number(before.n)))),
        "plain figures",
      ) : h("p", { className: "note" }, "Not evaluated yet."),
    );
    const two = h("div", { className: "charts" });
    main.append(h("h2", null, "The course ", h("small", null, "all curves, and their names, are under Curves")), two);
    panels().slice(0, 2).forEach((panel) => draw(two, panel, () => {}));
    if (data.different.length) {
      main.append(h("h2", null, "What differs ", h("small", null, "of the settings")), table([["setting"], ...data.runs.map((one) => [one.name])],
        data.different.slice(0, 30).map((name) => h("tr", null, h("td", null, name), data.runs.map((one) => h("td", { className: "text" }, setting(one, name)))))));
    }
    if (data.runs.length > 1) main.append(h("h2", null, "One of them"), runs());
    for (const note of run.notes) main.append(h("p", { className: "note warn" }, visible(note)));
    const left = h("section", null, h("h2", null, "What became of what was generated"), ...account(run));
    const right = h("section", null, h("h2", null, "The run"),
      table([[""], [""]], run.facts.map(([name, value]) => h("tr", null, h("th", null, name), h("td", { className: "words" }, visible(value))))));
    main.append(h("div", { className: "columns" }, left, right));
    if (run.answers.length) main.append(h("h2", null, "The same held-out problems, at each evaluation"), heldOut(run));
    main.append(h("h2", null, "Searchers ", h("small", null, "of what they have put into the journal")),
      table([["name"], ["first", "number"], ["last", "number"], ["trajectories", "number"], ["tokens", "number"], ["mean reward", "number"]],
        run.searchers.map((one) => h("tr", null, h("td", null, one.name), cell(seconds(one.first)), cell(seconds(one.last)),
          cell(number(one.trajectories)), cell(number(one.tokens)), cell(number(one.reward))))));
    main.append(h("h2", null, "What happened"), table([["at", "number"], ["what"]],
      run.events.map((event) => h("tr", null, cell(seconds(event.wall)), h("td", { className: "words" }, visible(event.text))))));
    main.append(h("p", { className: "note" }, `${sampleOf(run)} Made ${new Date(1000 * data.made).toISOString().slice(0, 16).replace("T", " ")} UTC.`));
  }

  function measured(figure) {
    if (!figure) return "–";
    return figure.low === undefined ? number(figure.value)
      : `${percent(figure.value)} [${tenths(figure.low)}, ${tenths(figure.high)}]`;
  }

  function range(run, ...figures) {
    const bars = figures.map((figure, i) => {
      if (!figure || figure.low === undefined) return null;
      const bar = h("i", { className: i ? "" : "from", colour: COLOURS[run.index % COLOURS.length], title: measured(figure) });
      bar.style.left = `${100 * figure.low}%`;
      bar.style.width = `max(3px, ${100 * (figure.high - figure.low)}%)`;
      return bar;
    });
    return h("div", { className: "range" }, bars);
  }

  function account(run) {
    const unit = state.unit, terms = accountOf(run, unit);
    if (!terms) return [h("p", { className: "note" }, "The account is made when the run ends.")];
    const outcomes = ["trained_once", ...Object.keys(WHY)].map((name) => [name, terms[name] || 0]).filter(([, n]) => n > 0);
    const total = outcomes.reduce((sum, [, n]) => sum + n, 0) || 1;
    const box = (name, n, kind) => {
      const made = h("div", { className: `box ${kind}`, title: WHY[name] || "" }, h("b", null, name.replace("_once", "").replaceAll("_", " ")), " ");
      made.style.minHeight = `${27 + Math.round((110 * n) / total)}px`;
      return made;
    };
    const sources = ["generated", "imported"].filter((name) => terms[name]).map((name) => {
      const made = box(name, terms[name], "");
      made.append(number(terms[name]));
      return made;
    });
    const share = (n) => `${number(n)} (${percent(n / total)})`;
    const difference = terms.difference;
    return [
      h("div", { className: "bar" }, choice("unit", [["trajectories", "trajectories"], ["tokens", "completion tokens"]])),
      h("div", { className: "flow" }, h("div", { className: "side" }, sources), h("div", { className: "arrow" }, "→"),
        h("div", { className: "side" }, outcomes.map(([name, n]) => {
          const made = box(name, n, name === "trained_once" ? "trained" : name);
          made.append(share(n), name === "trained_once" && terms.trained_total ? `, ${(terms.trained_total / n).toFixed(1)} uses each` : "");
          return made;
        }))),
      h("p", { className: "note" },
        difference === 0 ? "The account closes: everything generated or imported is on the right, once. "
          : h("span", { className: "bad" }, difference === null ? "" : `The account does not close: ${number(difference)}. `),
        terms.evaluation ? `Apart from it, ${number(terms.evaluation)} were generated to evaluate. ` : "",
        h("a", { href: hashOf({ view: "left" }), onclick: (event) => { event.preventDefault(); go({ view: "left" }); } }, "What was not trained, and why")),
    ];
  }

  // The summary's account; of a run that has not ended what the journal and the newest checkpoint say.
  function accountOf(run, unit) {
    if (run.account) return run.account[unit];
    if (!run.fates) return null;
    const terms = Object.fromEntries(Object.entries(run.fates.counts).map(([name, pair]) => [name, pair[unit === "tokens" ? 1 : 0]]));
    const all = run.searchers.reduce((sum, one) => sum + one[unit], 0);
    return { ...terms, generated: all, trained_once: terms.trained, difference: null };
  }

  function heldOut(run) {
    const versions = [...new Set(run.answers.flatMap((one) => one.answers.map((answer) => answer.version)))];
    return table([["problem"], ...versions.map((version) => [versionInWords(version)])], run.answers.map((one) =>
      h("tr", null, h("td", { className: "text" }, question(run, one.prompt)), versions.map((version) => {
        const answer = one.answers.find((candidate) => candidate.version === version);
        if (!answer) return h("td", null, "–");
        return h("td", { className: "text" }, h("b", { className: answer.correct ? "good" : "bad" }, answer.correct ? "✓ " : "✗ "), visible(answer.text) || "(empty)");
      }))));
  }

  function sampleOf(run) {
    const found = run.trajectories;
    if (!found) return "The run has no journal: no trajectories are shown.";
    let text = found.shown === found.of ? `All ${number(found.of)} trajectories are in this file.`
      : `This file has a sample of ${number(found.shown)} of ${number(found.of)} trajectories: the newest, best, worst and most used, those of samples.jsonl, and by lot whole rounds (all answers to a prompt at one time) and whole prompts. Counts and curves are of all.`;
    if (found.with_tokens < found.shown && !run.hide_text) text += ` ${number(found.with_tokens)} of them with their tokens.`;
    if (found.bodies_gone) text += ` ${number(found.bodies_gone)} could not be shown: deleted from the disk (--replay.keep-gb), or damaged.`;
    return text;
  }

  // Curves

  function panels() {
    const known = new Set(data.panels.flatMap((panel) => panel.series.map(([name]) => name)));
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics.columns)))]
      .filter((name) => !known.has(name) && !["step", "wall_seconds"].includes(name));
    const metric = names.includes(state.metric) ? state.metric : names.includes("loss") ? "loss" : names[0];
    return [...data.panels, ...(metric ? [{ title: metric, note: "", series: [[metric, metric]], percent: false, choose: names }] : [])];
  }

  function curves(run) {
    const readout = h("div", { className: "readout" }, "");
    const kinds = Object.entries(EVENTS).filter(([kind]) => data.runs.some((one) => one.events.some((event) => event.kind === kind)));
    const hidden = new Set(state.hide.split(",").filter(Boolean));
    const each = run.metrics.steps_per_point;
    const grid = h("div", { className: "charts" });
    main.append(
      h("div", { className: "bar" },
        choice("axis", [["step", "over steps"], ["time", "over wall-clock"]], (axis) => go({ axis, from: null, to: null })),
        h("button", { id: "whole", onclick: () => zoom(null, null) }, "whole run"),
        kinds.map(([kind, [name, colour]]) => {
          const key = h("span", { className: "key" });
          key.style.borderColor = colour;
          return h("label", null, h("input", {
            type: "checkbox", checked: !hidden.has(kind), onchange: () => {
              hidden.has(kind) ? hidden.delete(kind) : hidden.add(kind);
              go({ hide: [...hidden].join(",") }, () => charts.forEach((chart) => chart.redraw()));
            },
          }), key, name);
        })),
      h("p", { className: "note" }, "Drag to zoom into all charts, double-click for the whole run; click on a step to read its trajectories. ",
        data.runs.length > 1 ? "Lines are running means, a colour for each run. " : "Faint: as recorded; strong: running mean. ",
        each > 1 ? `Each point is the mean of ${each} steps.` : ""),
      readout, grid);
    panels().forEach((panel) => draw(grid, panel, (text) => { readout.textContent = text; }));
  }

  function xOf(run, wall) {
    if (state.axis === "time") return wall;
    const { wall_seconds: walls = [], step: steps = [] } = run.metrics.columns;
    const i = walls.findIndex((value) => value >= wall);
    return walls.length ? steps[i < 0 ? steps.length - 1 : i] : 0;
  }
  function lastX() {
    return Math.max(1e-9, ...data.runs.map((run) => (state.axis === "time" ? run.wall_seconds : run.steps)));
  }
  const TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5].concat(...[1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((ten) => [ten, 2 * ten, 5 * ten])); // of the axis' unit
  function timeUnit() {
    const last = lastX();
    return state.axis === "step" ? [1, "step"] : last <= 240 ? [1, "s"] : last <= 14400 ? [60, "min"] : [3600, "h"];
  }

  // x in ascending order, each once (a run that was resumed repeats steps: the later ones count)
  function ordered(x, ...ys) {
    if (x.every((value, i) => i === 0 || value > x[i - 1])) return [x, ...ys];
    const last = new Map(x.map((value, i) => [value, i]));
    const order = [...last.keys()].sort((a, b) => a - b).map((value) => last.get(value));
    return [x, ...ys].map((column) => order.map((i) => column[i]));
  }

  function smoothed(y) {
    const half = Math.floor(Math.max(5, Math.floor(y.length / 20)) / 2);
    const sums = [0];
    y.forEach((value) => sums.push(sums[sums.length - 1] + value));
    return y.map((_, i) => {
      const a = Math.max(0, i - half), b = Math.min(y.length, i + half + 1);
      return (sums[b] - sums[a]) / (b - a);
    });
  }

  const STYLES = [[], [7, 4], [2, 3]]; // of several runs' lines, whose colour is the run's
  const BORDERS = ["solid", "dashed", "dotted"]; // of the same in a legend

  // The tables of a panel, for uPlot.join, and how each of their columns is drawn
  function seriesOf(panel) {
    const tables = [], looks = [], one = data.runs.length === 1;
    const add = (run, x, label, i, columns) => {
      tables.push(ordered(x, ...columns.map(([y]) => y)));
      const stroke = COLOURS[(one ? i : run.index) % COLOURS.length];
      columns.forEach(([, look]) => looks.push({
        stroke, width: 2, points: { show: false }, dash: one ? [] : STYLES[i % 3], label: one ? label : `${run.name}: ${label}`, ...look,
        ...(look.faint ? { stroke: stroke + "55", width: 1, class: "quiet" } : {}),
      }));
    };
    // The running mean, and of one run faintly what was recorded; few points as they are
    const addMeans = (run, x, label, i, y) => {
      if (x.length < 20) add(run, x, label, i, [[y, { points: { show: x.length < 2 } }]]);
      else if (one) add(run, x, label, i, [[y, { faint: true }], [smoothed(y), { raw: true }]]);
      else add(run, x, label, i, [[smoothed(y), {}]]);
    };
    for (const run of data.runs) {
      if (panel.kind === "accuracy") {
        const names = [...new Set(run.evaluations.map((e) => e.metric))];
        const told = one ? names : names.filter((name) => name === "pass@1/sampled").concat(names).slice(0, 1);
        told.forEach((name, i) => {
          const found = run.evaluations.filter((e) => e.metric === name);
          const x = found.map((e) => (state.axis === "time" ? e.wall : Number(e.version.split(".")[1])));
          const bound = (side) => found.map((e) => (e[side] === undefined ? null : 100 * e[side]));
          const line = found.length > 1; // before and after are joined, too
          add(run, x, name, i, [[bound("high"), { class: "quiet", width: 0, bandTop: line }], [bound("low"), { class: "quiet", width: 0 }],
            [found.map((e) => 100 * e.value), { points: { show: true, size: 7 }, ...(line ? {} : { paths: () => null }) }]]);
        });
      } else if (panel.kind === "rates") {
        Object.entries(run.rates).forEach(([name, [walls, y]], i) => {
          if (walls.length) addMeans(run, walls.map((wall) => xOf(run, wall)), name, i, y);
        });
      } else {
        panel.series.forEach(([name, label], i) => {
          const all = own(run.metrics.columns, name), xs = run.metrics.columns[state.axis === "time" ? "wall_seconds" : "step"];
          if (!all) return;
          const rows = all.map((_, row) => row).filter((row) => all[row] !== null);
          const [x, y] = ordered(rows.map((row) => xs[row]), rows.map((row) => all[row] * (panel.percent ? 100 : 1)));
          if (panel.kind === "shares") add(run, x, label, i, [[y, { points: { show: x.length < 2 } }]]);
          else addMeans(run, x, label, i, y);
        });
      }
    }
    return [tables, looks];
  }

  function draw(grid, panel, tell) {
    const place = h("div");
    const title = panel.choose ? choice("metric", panel.choose.map((name) => [name, name]), undefined, panel.title) : panel.title;
    const [tables, looks] = seriesOf(panel);
    grid.append(h("div", { className: "chart" }, h("h3", null, title, h("small", null, panel.note)), place));
    if (!tables.length) {
      place.append(h("div", { className: "none" }, "not recorded"));
      return;
    }
    const [per, unit] = timeUnit(), percentage = panel.percent ? " %" : "";
    const value = (u, v, i, row) => {
      if (v === null || v === undefined) return "–";
      const raw = looks[i - 1].raw && row !== null && u.data[i - 1][row];
      return number(v) + percentage + (raw ? ` (${number(raw)})` : "");
    };
    const label = (v) => (state.axis === "time" ? `${number(v / per)} ${unit}` : `step ${number(Math.round(v))}`);
    const chart = new uPlot({
      width: Math.max(280, place.clientWidth), height: 210,
      series: [{ label: state.axis === "time" ? "time" : "step", value: (u, v) => (v === null ? "–" : label(v)) },
        ...looks.map((look) => ({ ...look, value, spanGaps: true }))],
      legend: { markers: { dash: (u, i) => BORDERS[Math.max(0, STYLES.indexOf(looks[i - 1].dash))] } },
      bands: looks.map((look, i) => look.bandTop && { series: [i + 1, i + 2], fill: look.stroke + "22" }).filter(Boolean),
      scales: {
        x: { time: false, range: () => [state.from ?? 0, state.to ?? lastX()] },
        y: { range: (u, low, high) => bounds(low, high, panel) },
      },
      axes: [
        { stroke: "#66707d", grid: { show: false }, ticks: { stroke: "#c9d0d8", size: 5 }, size: 30, incrs: TICKS.map((tick) => tick * per), values: (u, all) => all.map((v) => `${number(v / per)}${state.axis === "time" ? " " + unit : ""}`) },
        { stroke: "#66707d", grid: { stroke: "#e3e7ec", width: 1 }, ticks: { show: false }, size: 56, values: (u, all) => all.map((v) => number(v) + percentage) },
      ],
      cursor: {
        sync: { key: "all", setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false,
        bind: { dblclick: () => () => { zoom(null, null); return null; } }, hover: { skip: [null, undefined], prox: 40 },
      },
      hooks: {
        draw: [drawEvents],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const from = u.posToVal(u.select.left, "x"), to = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ width: 0, left: 0, top: 0, height: 0 }, false);
          zoom(Number(from.toPrecision(6)), Number(to.toPrecision(6)));
        }],
        setCursor: [(u) => {
          if (u.cursor.left >= 0) tell(at(u.posToVal(u.cursor.left, "x"), u, label));
          else atRest(u);
        }],
      },
    }, uPlot.join(tables), place);
    atRest(chart);
    let pressed = 0;
    chart.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    chart.over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - pressed) < 4) openStep(chart.posToVal(chart.cursor.left, "x"));
    });
    new ResizeObserver(() => {
      const width = place.clientWidth;
      if (width && width !== chart.width) chart.setSize({ width: Math.max(280, width), height: 210 });
    }).observe(place);
    charts.push(chart);
  }

  // Without the mouse a legend has the last value of each series
  function atRest(chart) {
    const idxs = chart.data.map((column) => column.findLastIndex((value) => value !== null && value !== undefined));
    chart.setLegend({ idxs }, false);
  }

  function bounds(low, high, panel) {
    if (low === null || low === undefined) return [0, 1];
    if (panel.kind === "accuracy") return [0, 100];
    const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [low >= 0 && low < high * 0.7 ? 0 : low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
  }

  function zoom(from, to) {
    go({ from, to }, () => charts.forEach((chart) => chart.setScale("x", { min: from ?? 0, max: to ?? lastX() })));
  }

  function eventsShown() {
    const hidden = state.hide.split(",");
    return data.runs.flatMap((run) => run.events.filter((event) => !hidden.includes(event.kind)).map((event) => [run, event]));
  }

  function drawEvents(chart) {
    const { left, top, width, height } = chart.bbox, context = chart.ctx;
    context.save();
    context.lineWidth = devicePixelRatio;
    for (const [run, event] of eventsShown()) {
      const x = Math.round(chart.valToPos(xOf(run, event.wall), "x", true)) + 0.5;
      if (x < left || x > left + width) continue;
      const evaluated = event.kind === "evaluation";
      context.strokeStyle = evaluated && data.runs.length > 1 ? COLOURS[run.index % COLOURS.length] + "66" : EVENTS[event.kind][1];
      context.setLineDash(evaluated ? [2 * devicePixelRatio, 3 * devicePixelRatio] : []);
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
    }
    context.restore();
  }

  // What the line above the charts says of a moment
  function at(x, chart, label) {
    const near = eventsShown().filter(([run, event]) => Math.abs(chart.valToPos(xOf(run, event.wall), "x") - chart.cursor.left) < 6);
    const { wall_seconds: walls = [], step: steps = [] } = data.runs[state.run].metrics.columns;
    const i = state.axis === "time" ? walls.findIndex((wall) => wall >= x) : -1;
    const step = i >= 0 ? `, step ${number(steps[i])}` : "";
    return label(x) + step + near.map(([run, event]) => ` · ${data.runs.length > 1 ? run.name + ": " : ""}${visible(event.text)}`).join("");
  }

  function openStep(x) {
    const { wall_seconds: walls = [], step: steps = [] } = data.runs[state.run].metrics.columns;
    if (!steps.length) return;
    const i = state.axis === "time" ? walls.findIndex((wall) => wall >= x) : steps.findIndex((step) => step >= x);
    go({ view: "read", by: "answers", step: steps[i < 0 ? steps.length - 1 : i], t: null, prompt: null });
  }

  // Trajectories

  // Returns what a step trained on, as far as samples.jsonl has it, and what its weights sampled: (rows, sentence)
  function ofStep(run, step) {
    const recorded = new Set(run.t.trained.flatMap((uses) => uses.map((use) => use.step)));
    const nearest = [...recorded].reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), Infinity);
    const before = run.step.filter((one) => one >= 0 && one <= step);
    const version = before.length ? before.reduce((a, b) => Math.max(a, b)) : -1;
    const trained = new Set(), rows = [];
    run.t.trained.forEach((uses, row) => { if (uses.some((use) => use.step === nearest)) trained.add(row); });
    for (let row = 0; row < run.size; row++) if (trained.has(row) || run.step[row] === version) rows.push(row);
    const text = `Step ${number(step)}: ` + (nearest === Infinity ? "no batch is on record (--record.samples-every); "
      : `${trained.size} trajectories of the batch of step ${number(nearest)}${nearest === step ? "" : ", the nearest on record"} (--record.samples-per-batch, --record.samples-every); `)
      + `${rows.length - trained.size} sampled by the weights of step ${number(version)}, the newest before it.`;
    return [rows, text];
  }

  const ORDERS = {
    newest: ["newest", (run) => (a, b) => b - a], oldest: ["oldest", () => (a, b) => a - b],
    best: ["best", (run) => by(run.t.reward, -1)], worst: ["worst", (run) => by(run.t.reward, 1)],
    used: ["most used", (run) => by(run.t.uses, -1)], longest: ["longest", (run) => by(run.t.length, -1)],
    shortest: ["shortest", (run) => by(run.t.length, 1)], ratio: ["highest log-ratio", (run) => by(run.t.ratio, -1)],
    residual: ["largest residual", (run) => by(run.t.residual.map((r) => (r === null ? null : Math.abs(r))), -1)],
    version: ["by version", (run) => by(run.step, 1)], searcher: ["by searcher", (run) => by(run.t.searcher, 1)],
  };
  const PROMPT_ORDERS = {
    changed: ["most improved", (p) => -(p.last - p.first)], fell: ["most fallen", (p) => p.last - p.first],
    worst: ["worst", (p) => p.mean], best: ["best", (p) => -p.mean], most: ["most answers", (p) => -p.rows.length],
  };
  function by(column, sign) {
    return (a, b) => {
      const [x, y] = [column[a], column[b]];
      return x === null || y === null ? (x === null) - (y === null) || a - b : sign * (x - y) || b - a;
    };
  }

  function matching(run) {
    const { q, searcher, stop, fate, v0, v1, r0, r1, l0, l1, prompt, step } = state;
    const within = (value, low, high) => (low === null || (value !== null && value >= low)) && (high === null || (value !== null && value <= high));
    const words = q.toLowerCase();
    let [rows, said] = step === null ? [null, ""] : ofStep(run, step);
    rows ||= Array.from({ length: run.size }, (_, row) => row);
    if (words && !run.lower) {
      run.lower = run.t.text.map((text) => (text || "").toLowerCase());
      run.lowerPrompt = run.trajectories.prompts.map(({ text = "", key }) => `${key} ${question(run, text)}`.toLowerCase());
    }
    const found = rows.filter((row) =>
      (!words || run.lower[row].includes(words) || run.lowerPrompt[run.t.prompt[row]].includes(words))
      && (searcher === "" || run.t.searcher[row] === Number(searcher)) && (stop === "" || run.t.stop[row] === stop)
      && (fate === "" || (fate === "untrained" ? run.t.fate[row] !== null && run.t.fate[row] !== "trained" : run.t.fate[row] === fate))
      && within(run.step[row], v0, v1) && within(run.t.reward[row], r0, r1) && within(run.t.length[row], l0, l1)
      && (prompt === null || run.t.prompt[row] === prompt));
    return [found, said];
  }

  function promptsOf(run, rows) {
    const mean = (some) => {
      const known = some.map((row) => run.t.reward[row]).filter((reward) => reward !== null);
      return known.length ? known.reduce((a, b) => a + b, 0) / known.length : 0;
    };
    return [...new Set(rows.map((row) => run.t.prompt[row]))].map((prompt) => {
      const all = run.byPrompt[prompt], rounds = [...new Set(all.map((row) => run.t.round[row]))];
      return { prompt, rows: all, rounds: rounds.length, mean: mean(all), first: mean(run.byRound[rounds[0]]), last: mean(run.byRound[rounds[rounds.length - 1]]) };
    });
  }

  function trajectories(run) {
    main.append(...[runs()].filter(Boolean));
    if (!run.trajectories || !run.size) {
      main.append(h("p", { className: "note" }, run.trajectories ? "The journal is empty." : sampleOf(run)));
      return;
    }
    const filters = h("div", { className: "filters" }), counted = h("div", { className: "counted" });
    const banner = h("div"), list = h("div", { className: "list", tabIndex: 0 }), detail = h("div");
    main.append(filters, banner, h("div", { className: "reading" }, h("div", null, counted, list), detail));
    const again = (some) => go(some, refresh);
    const some = (name, title) => h("input", {
      className: "small", type: "text", inputMode: "decimal", name, title, placeholder: title, value: state[name] ?? "",
      oninput: (event) => {
        const value = event.target.value.trim();
        again({ [name]: value === "" || !Number.isFinite(Number(value)) ? null : Number(value) });
      },
    });
    filters.append(
      choice("by", [["answers", "answers"], ["prompts", "prompts"]], (value) => go({ by: value, sort: value === "prompts" ? "changed" : "newest" })),
      h("input", { type: "search", name: "q", placeholder: run.hide_text ? "search keys of prompts" : "search prompts and answers  ( / )", value: state.q, oninput: (event) => again({ q: event.target.value }) }),
      choice("sort", Object.entries(state.by === "prompts" ? PROMPT_ORDERS : ORDERS).map(([name, [text]]) => [name, text]), (sort) => again({ sort })),
      choice("searcher", [["", "all searchers"], ...run.trajectories.searchers.map((name, i) => [i, name])], (searcher) => again({ searcher })),
      choice("stop", [["", "any ending"], ...run.stopKinds.map((kind) => [kind, `ended: ${kind}`])], (stop) => again({ stop })),
      choice("fate", [["", "trained or not"], ...run.fateKinds.map((kind) => [kind, kind]), ["untrained", "all not trained"]], (fate) => again({ fate })),
      h("label", null, "version", some("v0", "from"), some("v1", "to")), h("label", null, "reward", some("r0", "from"), some("r1", "to")),
      h("label", null, "length", some("l0", "from"), some("l1", "to")),
      h("button", { onclick: () => go({ q: "", searcher: "", stop: "", fate: "", v0: null, v1: null, r0: null, r1: null, l0: null, l1: null, step: null, prompt: null }) }, "clear"),
    );
    const HEIGHT = 52;
    let items = [];

    // Filter, sort, and show again
    function refresh() {
      const [rows, said] = matching(run);
      const prompts = state.by === "prompts";
      if (prompts) {
        const order = (PROMPT_ORDERS[state.sort] || PROMPT_ORDERS.changed)[1];
        items = promptsOf(run, rows).sort((a, b) => order(a) - order(b) || a.prompt - b.prompt);
      } else items = rows.sort((ORDERS[state.sort] || ORDERS.newest)[1](run));
      counted.textContent = `${number(items.length)} ${prompts ? "prompts of" : "of"} ${number(run.size)} trajectories${run.size < run.trajectories.of ? ` shown, a sample of ${number(run.trajectories.of)}` : ""}`;
      counted.title = sampleOf(run);
      const only = state.prompt === null ? "" : ` Only the prompt ${questionOf(run, state.prompt)}`;
      banner.replaceChildren(...(said || only ? [h("div", { className: "banner" }, said + only, " ", h("button", { onclick: () => go({ step: null, prompt: null }) }, "show all"))] : []));
      show();
      const selected = position();
      list.scrollTop = selected > 3 ? (selected - 2) * HEIGHT : 0;
      show();
      if (selected < 0 && items.length) select(0);
      else read();
    }

    // The items of the list that are in sight
    function show() {
      const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 4), last = Math.min(items.length, first + Math.ceil(list.clientHeight / HEIGHT) + 9);
      const space = h("div");
      space.style.height = `${items.length * HEIGHT}px`;
      const shown = [];
      for (let i = first; i < last; i++) {
        const item = state.by === "prompts" ? promptItem(items[i]) : answerItem(items[i]);
        item.style.top = `${i * HEIGHT}px`;
        item.addEventListener("click", () => select(i));
        shown.push(item);
      }
      const top = list.scrollTop;
      list.replaceChildren(space, ...shown);
      list.scrollTop = top;
    }
    function answerItem(row) {
      const reward = run.t.reward[row], uses = run.t.uses[row];
      return h("div", { className: "item" + (run.t.place[row] === state.t ? " on" : "") },
        h("div", null, h("span", { className: "reward", colour: rewardColour(run, reward) }, number(reward, 3))),
        h("div", { className: "one" }, textOf(run, row)),
        h("div", { className: "two" }, `${questionOf(run, run.t.prompt[row])}  ·  v${run.t.version[row]}  ·  ${run.t.length[row]} tokens  ·  ${uses === null ? run.t.stop[row] : uses === 1 ? "1 use" : `${uses} uses`}`));
    }
    function promptItem(p) {
      return h("div", { className: "item" + (run.t.prompt[run.byPlace.get(state.t)] === p.prompt ? " on" : "") },
        h("div", null, h("span", { className: "reward", colour: rewardColour(run, p.mean) }, number(p.mean, 3))),
        h("div", { className: "one" }, questionOf(run, p.prompt)),
        h("div", { className: "two" }, `${p.rows.length} answers in ${p.rounds} ${p.rounds === 1 ? "round" : "rounds"}${p.rounds > 1 ? `: reward ${number(p.first, 3)} → ${number(p.last, 3)}` : ""}`));
    }
    function position() {
      const row = run.byPlace.get(state.t);
      if (row === undefined) return -1;
      return state.by === "prompts" ? items.findIndex((p) => p.prompt === run.t.prompt[row]) : items.indexOf(row);
    }
    function select(i) {
      const item = items[i];
      if (item === undefined) return;
      const row = state.by === "prompts" ? item.rows[item.rows.length - 1] : item;
      open(row);
      if (i * HEIGHT < list.scrollTop) list.scrollTop = i * HEIGHT;
      else if ((i + 1) * HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = (i + 1) * HEIGHT - list.clientHeight;
    }
    const open = (row) => go({ t: run.t.place[row] }, () => { show(); read(); });

    // One trajectory among those of its round, and the other rounds of its prompt
    function read() {
      const row = run.byPlace.get(state.t);
      if (row === undefined) {
        detail.replaceChildren(h("p", { className: "note" }, items.length ? "Choose a trajectory." : "Nothing matches: clear the filters."));
        return;
      }
      const prompt = run.t.prompt[row], round = run.t.round[row], { fields } = run.trajectories.prompts[prompt];
      const rounds = [...new Set(run.byPrompt[prompt].map((one) => run.t.round[one]))];
      const group = run.byRound[round];
      const gaps = group.map((one) => run.t.residual[one]).filter((r) => r !== null);
      detail.replaceChildren(
        h("div", { className: "prompt text" }, promptOf(run, prompt)),
        fields ? h("p", { className: "note" }, "fields for the reward: ", visible(fields)) : "",
        h("div", { className: "bar" },
          h("h2", null, `Its group: ${group.length} answers `, h("small", null, `${versionInWords(run.t.version[group[0]])}, ${seconds(run.t.wall[group[0]])}, ${run.trajectories.searchers[run.t.searcher[group[0]]]}, round ${rounds.indexOf(round) + 1} of ${rounds.length} of this prompt`)),
          h("button", { onclick: () => turn(-1), disabled: rounds[0] === round }, "← earlier"),
          h("button", { onclick: () => turn(1), disabled: rounds[rounds.length - 1] === round }, "later →")),
        run.hide_text ? h("p", { className: "note" }, "The run was recorded with record.hide_text: only keys and numbers are shown.") : colours(row),
        h("div", { className: "group" }, distinct(group).map((copies) => card(copies.includes(row) ? row : copies[0], copies, copies.includes(row)))),
        h("p", { className: "note" }, "log-ratio: log-probability when sampled minus the reference's, in nats. ",
          gaps.length ? "residual: log Z + log-ratio − reward/β when sampled, log Z estimated from this group; training drives it to 0. " : "",
          "Uses are those of the newest checkpoint."),
        ...(rounds.length > 1 ? [h("h2", null, "How the answers to this prompt changed"), history_(rounds, round)] : []),
        h("p", { className: "note" }, h("kbd", null, "↑"), " ", h("kbd", null, "↓"), " next in the list   ", h("kbd", null, "←"), " ", h("kbd", null, "→"), " earlier and later rounds of the prompt   ", h("kbd", null, "/"), " search   ", h("kbd", null, "r"), " raw tokens"),
      );
    }

    function turn(way) {
      const row = run.byPlace.get(state.t);
      const rounds = [...new Set(run.byPrompt[run.t.prompt[row]].map((one) => run.t.round[one]))];
      const next = rounds[rounds.indexOf(run.t.round[row]) + way];
      if (next !== undefined) open([...run.byRound[next]].sort(by(run.t.reward, -1))[0]);
    }

    function colours(row) {
      const uses = run.t.trained[row].filter((use) => use.log_policy);
      const pairs = [["ratio", "colour: policy when sampled − reference"], ["surprise", "colour: −log policy when sampled"], ["none", "no colour"]];
      if (uses.length) pairs.splice(1, 0, ["trained", `colour: policy when trained (step ${uses[uses.length - 1].step}) − reference`], ["behaviour", "colour: policy when trained − when sampled"]);
      return h("div", { className: "bar" }, choice("colour", pairs, (colour) => go({ colour }, read)),
        h("span", { className: "scale" }, state.colour === "none" ? "" : ["−3", h("i"), "+3 nats"]),
        h("label", null, h("input", { type: "checkbox", name: "raw", checked: !!state.raw, onchange: () => go({ raw: state.raw ? 0 : 1 }, read) }), "raw tokens"));
    }

    // The answers of a group, best first, each with its copies
    function distinct(group) {
      const found = new Map();
      for (const one of [...group].sort(by(run.t.reward, -1))) {
        const key = run.hide_text ? one : JSON.stringify([run.t.reward[one], run.t.text[one], run.t.tokens[one]]);
        found.set(key, [...(found.get(key) || []), one]);
      }
      return [...found.values()];
    }

    function card(row, copies, on) {
      const reward = run.t.reward[row], parts = Object.entries(run.trajectories.parts).filter(([, column]) => column[row] !== null);
      const facts = [
        ["log-ratio", number(run.t.ratio[row])], ["residual", number(run.t.residual[row])],
        ["uses", copies.map((one) => (run.t.uses[one] === null ? "unknown" : run.t.fate[one] === "trained" ? run.t.uses[one] : `0 (${run.t.fate[one]})`)).filter((use, i, all) => copies.length < 4 || all.indexOf(use) === i).join(", ")],
        ["tokens", run.t.length[row]], ["segments", run.t.segments[row] > 1 ? run.t.segments[row] : "–"], ["ended", run.t.stop[row]],
      ];
      if (on) facts.push(["log reference", number(run.t.log_reference[row])], ["reference", run.t.reference[row]], ["sampled at", run.t.sampling[row] || "elsewhere"],
        ["trained at step", run.t.trained[row].map((use) => use.step).join(", ") || "–"], ["journal", `seq ${run.t.place[row]}`]);
      return h("div", { className: "card" + (on ? " on" : ""), onclick: () => { if (!String(getSelection())) open(row); } },
        h("div", { className: "head" }, h("span", { className: "reward", colour: rewardColour(run, reward) }, number(reward)), copies.length > 1 ? h("b", null, `${copies.length} ×`) : null,
          parts.map(([name, column]) => h("span", null, `${name} ${number(column[row])}`)),
          facts.filter(([, value]) => value !== "–").map(([name, value]) => h("span", null, `${name} ${value}`))),
        run.hide_text ? null : h("div", { className: "text" }, ...spans(row)));
    }

    // An answer's tokens, coloured; its text where the file does not have them
    function spans(row) {
      const tokens = run.t.tokens[row], pieces = run.trajectories.pieces;
      if (!tokens || !Object.keys(pieces).length) return [state.raw && tokens ? tokens.join(" ") : textOf(run, row)];
      const use = run.t.trained[row].filter((one) => one.log_policy).pop();
      const behaviour = run.t.log_behavior[row], ratio = run.t.log_ratio[row], begins = run.t.begins[row] || [];
      const reference = behaviour && behaviour.map((value, i) => value - ratio[i]);
      const value = {
        ratio: (i) => ratio && ratio[i], surprise: (i) => behaviour && -behaviour[i],
        trained: (i) => (use && reference ? use.log_policy[i] - reference[i] : null),
        behaviour: (i) => (use && behaviour ? use.log_policy[i] - behaviour[i] : null), none: () => null,
      }[state.colour] || (() => null);
      const made = tokens.map((token, i) => {
        const piece = pieces[token] ?? `⟨${token}⟩`, v = value(i);
        const said = behaviour ? `\nlog policy when sampled ${(behaviour[i] / 100).toFixed(2)}\nlog reference ${(reference[i] / 100).toFixed(2)}${use && use.log_policy[i] !== undefined ? `\nlog policy at step ${use.step} ${(use.log_policy[i] / 100).toFixed(2)}` : ""}` : "";
        const span = h("span", { className: "token" + (state.raw ? " raw" : ""), title: `${JSON.stringify(piece)} (${token})${said}` },
          state.raw ? visible(piece).replace(/\n/g, "↵\n").replace(/ /g, "·") : visible(piece));
        if (v !== null && v !== undefined) span.style.background = heat(v / 100);
        return begins.includes(i) ? [h("span", { className: "segment" }, "a new segment, which reads nothing above"), span] : [span];
      }).flat();
      return tokens.length < run.t.length[row] ? [...made, " …"] : made;
    }

    function history_(rounds, current) {
      return table([["at", "number"], ["version"], ["reward", "number"], ["answers, the most frequent first"]], rounds.map((round) => {
        const rows = run.byRound[round], counts = new Map();
        for (const row of rows) {
          const text = textOf(run, row);
          counts.set(text, [...(counts.get(text) || []), row]);
        }
        const known = rows.map((row) => run.t.reward[row]).filter((reward) => reward !== null);
        const answers = [...counts.entries()].sort((a, b) => b[1].length - a[1].length);
        return h("tr", { className: round === current ? "on" : "", onclick: () => open([...rows].sort(by(run.t.reward, -1))[0]) },
          cell(seconds(run.t.wall[rows[0]])), h("td", null, run.t.version[rows[0]]),
          cell(known.length ? number(known.reduce((a, b) => a + b, 0) / known.length, 3) : "–"),
          h("td", null, run.hide_text ? `${rows.length} answers` : answers.slice(0, 8).map(([text, of]) => {
            const chip = h("span", { className: "chip", title: text }, of.length > 1 ? `${of.length} × ` : "", text.slice(0, 120));
            chip.style.borderColor = rewardColour(run, run.t.reward[of[0]]);
            return chip;
          }), answers.length > 8 ? ` and ${answers.length - 8} more` : ""));
      }), "plain rounds");
    }

    list.addEventListener("scroll", show);
    keys = (key) => {
      if (key === "ArrowDown" || key === "j") select(Math.min(items.length - 1, position() + 1));
      else if (key === "ArrowUp" || key === "k") select(Math.max(0, position() - 1));
      else if (key === "ArrowLeft") turn(-1);
      else if (key === "ArrowRight") turn(1);
      else if (key === "r") go({ raw: state.raw ? 0 : 1 }, read);
      else if (key === "/") filters.querySelector("input[name=q]").focus();
      else return false;
      return true;
    };
    refresh();
  }

  function heat(nats) {
    const share = Math.min(1, Math.abs(nats) / 3);
    return mix([255, 255, 255], nats < 0 ? [233, 120, 132] : [104, 172, 222], share);
  }

  // What was not trained

  function notTrained(run) {
    main.append(...[runs()].filter(Boolean));
    const terms = accountOf(run, "trajectories"), tokens = accountOf(run, "tokens");
    main.append(h("h2", null, "What was not trained, and why"));
    if (terms) {
      main.append(table([["", ""], ["trajectories", "number"], ["tokens", "number"], ["why"], [""]], Object.entries(WHY).map(([name, why]) => {
        const readable = run.trajectories && run.fateKinds && run.fateKinds.includes(name);
        return h("tr", null, h("td", null, name.replaceAll("_", " ")), cell(number(terms[name] || 0)), cell(number((tokens || {})[name] || 0)),
          h("td", { className: "words" }, why), h("td", null, readable && h("button", { onclick: () => go({ ...DEFAULTS, view: "read", run: state.run, fate: name }) }, "read them")));
      })));
    }
    main.append(h("p", { className: "note" }, run.fates ? `Which trajectory is which is as of the newest checkpoint, ${versionInWords(run.fates.as_of)}. ${sampleOf(run)}` : "Which trajectory was trained on is not known: there is no checkpoint."));
    for (const one of run.imports) {
      main.append(h("h2", null, "Refused by tba import ", h("small", null, visible(one.source))),
        table([["lines", "number"], ["why"]], Object.entries(one.refused).map(([why, count]) => h("tr", null, cell(number(count)), h("td", { className: "words" }, visible(why))))));
    }
    if (run.rejected.length) {
      main.append(h("h2", null, "Rejected answers ", h("small", null, "as searchers logged them, one of each round")),
        h("div", { className: "text" }, run.rejected.map((line) => visible(line) + "\n")));
    }
    if (!run.trajectories || !run.size) return;
    const rows = run.t.fate.map((fate, row) => [fate, row]).filter(([fate]) => fate !== null && fate !== "trained").map(([, row]) => row).reverse();
    if (!rows.length) return;
    main.append(h("h2", null, "The newest of them ", h("small", null, `${number(Math.min(100, rows.length))} of ${number(rows.length)} in this file`)),
      table([["", ""], ["reward", "number"], ["answer"], ["prompt"], ["version"], ["at", "number"]], rows.slice(0, 100).map((row) => h("tr", null,
        h("td", null, run.t.fate[row]), cell(number(run.t.reward[row])), h("td", { className: "text" }, textOf(run, row).slice(0, 300)),
        h("td", { className: "text" }, questionOf(run, run.t.prompt[row]).slice(0, 200)), h("td", null, run.t.version[row]),
        cell(h("a", { href: hashOf({ ...DEFAULTS, view: "read", run: state.run, t: run.t.place[row] }) }, seconds(run.t.wall[row])))))));
  }

  // Settings

  function setting(run, name) {
    const value = own(run.settings, name);
    return value === undefined ? "–" : value === null ? "None" : visible(String(value));
  }

  function settings() {
    const several = data.runs.length > 1, names = [...new Set(data.runs.flatMap((run) => Object.keys(run.settings)))];
    const body = h("div"), different = new Set(data.different);
    const fill = () => {
      const words = state.s.toLowerCase();
      const rows = names.filter((name) => (!state.differ || different.has(name)) && (name.includes(words) || data.runs.some((run) => setting(run, name).toLowerCase().includes(words))));
      body.replaceChildren(table([["setting"], ...data.runs.map((run) => [several ? run.name : "value"])], rows.map((name) =>
        h("tr", { className: different.has(name) && several ? "differs" : "" }, h("td", null, name), data.runs.map((run) => h("td", { className: "text" }, setting(run, name)))))));
    };
    main.append(
      h("div", { className: "bar" },
        h("input", { type: "search", name: "s", placeholder: "find a setting  ( / )", value: state.s, oninput: (event) => go({ s: event.target.value }, fill) }),
        several && h("label", null, h("input", { type: "checkbox", name: "differ", checked: !!state.differ, onchange: () => go({ differ: state.differ ? 0 : 1 }, fill) }), `only what differs (${different.size})`)),
      h("p", { className: "note" }, "As resolved. A name is the flag's: --", "seed 1 sets seed."), body);
    keys = (key) => key === "/" && (main.querySelector("input[name=s]").focus(), true);
    fill();
  }

  // Keys, links

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (keys(event.key)) event.preventDefault();
  });
  for (const moved of ["popstate", "hashchange"]) {
    addEventListener(moved, () => {
      if (hashOf({}) === location.hash || (hashOf({}) === "#" && location.hash === "")) return;
      state = fromHash();
      render();
    });
  }
  render();
})();
