(function () {
  var root = document.documentElement;
  root.classList.add("script");
  try {
    var theme = localStorage.getItem("anytime-theme");
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  } catch (error) { /* local files may have no storage */ }
})();
