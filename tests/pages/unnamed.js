// Charts without a table, controls without a name or too small to hit, tables without heads,
// sections without a title, ids that are there twice.
() => {
  const all = selector => [...document.querySelectorAll(selector)];
  const show = e => e.outerHTML.slice(0, 60);
  const tabled = e => document.getElementById(e.dataset.of)?.tHead && e.ariaLabel;
  const named = e => e.textContent.trim() || e.ariaLabel || e.labels?.length
    || e.querySelector("img[alt]:not([alt=''])");
  const titled = e => e.ariaLabel || document.getElementById(e.getAttribute("aria-labelledby"));
  const small = e => {
    const box = e.getBoundingClientRect();
    return e.checkVisibility() && Math.min(box.width, box.height) < 24;
  };
  const ids = all("[id]").map(e => e.id);
  return [
    ...all(".plot").filter(e => !tabled(e)).map(show),
    ...all("a, button, input:not([type=hidden])").filter(e => !named(e)).map(show),
    ...all("nav a, button, summary").filter(small).map(show),
    ...all("table:not([role=presentation])").filter(e => !e.querySelector("thead th[scope=col]")).map(show),
    ...all("section").filter(e => !titled(e)).map(show),
    ...ids.filter((id, i) => ids.indexOf(id) !== i).map(id => `twice: ${id}`),
  ];
}
