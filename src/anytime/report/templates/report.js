(function () {
  "use strict";
  var root = document.documentElement;
  var button = document.getElementById("theme");

  function isDark() {
    if (root.dataset.theme) return root.dataset.theme === "dark";
    return matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function nameButton() {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
  }
  button.addEventListener("click", function () {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("anytime-theme", root.dataset.theme); } catch (error) { /* not remembered */ }
    nameButton();
  });
  nameButton();

  var block = document.getElementById("inputs-data");
  if (!block) return;
  var data = JSON.parse(block.textContent);
  var slider = document.getElementById("group");
  var choice = document.getElementById("other-rule");
  var count = document.getElementById("inputs-count");
  var place = document.getElementById("group-place");
  var body = document.querySelector("#inputs-table tbody");
  var panels = Array.prototype.slice.call(document.querySelectorAll(".panel"));
  var svgName = panels[0].querySelector("svg").namespaceURI;

  function name(input) {
    return "input " + input[0] + (input[1] === null ? "" : ", class " + input[1]);
  }
  function dropClass(drop) {
    return drop >= data.limits[0] ? "large-drop" : drop >= data.limits[1] ? "small-drop" : "no-drop";
  }
  function line(values) {
    return values.map(function (value, exit) {
      var y = data.y[0] + (data.y[1] - data.y[0]) * value;
      return (exit ? "L" : "M") + data.x[exit] + "," + y.toFixed(1);
    }).join("");
  }
  function fixed(value) { return value.toFixed(2); }

  function drawPanel(panel, rule, inputs) {
    var group = panel.querySelector(".paths");
    group.textContent = "";
    inputs.forEach(function (input, index) {
      var path = document.createElementNS(svgName, "path");
      var title = document.createElementNS(svgName, "title");
      var values = input[2][rule], drop = input[3][rule];
      path.setAttribute("class", "line " + dropClass(drop));
      path.setAttribute("data-line", index);
      path.setAttribute("d", line(values));
      title.textContent = name(input) + ": " + values.map(fixed).join(", ") + "; drop " + fixed(drop);
      path.appendChild(title);
      group.appendChild(path);
    });
    panel.querySelector(".rule-name").textContent = data.rules[rule];
  }
  function fillTable(rules, inputs) {
    body.textContent = "";
    inputs.forEach(function (input) {
      rules.forEach(function (rule) {
        var row = body.insertRow();
        var label = input[1] === null ? "none" : input[1];
        [input[0], label, data.rules[rule]].concat(input[2][rule].map(fixed), fixed(input[3][rule])).forEach(function (text, index) {
          var cell = document.createElement(index ? "td" : "th");
          if (!index) cell.scope = "row";
          cell.textContent = text;
          row.appendChild(cell);
        });
      });
    });
  }
  function show() {
    var group = slider ? Number(slider.value) - 1 : 0;
    var start = group * data.group;
    var inputs = data.inputs.slice(start, start + data.group);
    var rules = data.panels.slice();
    if (choice) rules[1] = Number(choice.value);
    panels.forEach(function (panel, index) { drawPanel(panel, rules[index], inputs); });
    fillTable(rules, inputs);
    var large = rules.map(function (rule) {
      var found = inputs.filter(function (input) { return input[3][rule] >= data.limits[0]; });
      return found.length + " with " + data.rules[rule];
    });
    count.textContent = "Inputs " + (start + 1) + " to " + (start + inputs.length) + " of " + data.inputs.length +
      " sampled inputs. Drops of " + data.limits[0] + " or more: " + large.join(", ") + ".";
    if (slider) {
      place.textContent = slider.value + " of " + slider.max;
      slider.setAttribute("aria-valuetext", "inputs " + (start + 1) + " to " + (start + inputs.length));
    }
  }
  function mark(event) {
    var line = event.target.closest ? event.target.closest("[data-line]") : null;
    var which = event.type === "pointerover" && line ? line.dataset.line : null;
    document.querySelectorAll(".panel [data-line]").forEach(function (path) {
      path.classList.toggle("marked", path.dataset.line === which);
      path.classList.toggle("dimmed", which !== null && path.dataset.line !== which);
    });
  }
  // A browser may restore the slider on reload; start where the page without script does.
  if (slider) { slider.value = 1; slider.addEventListener("input", show); }
  if (choice) { choice.value = String(data.panels[1]); choice.addEventListener("change", show); }
  panels.forEach(function (panel) {
    panel.addEventListener("pointerover", mark);
    panel.addEventListener("pointerout", mark);
  });
})();
