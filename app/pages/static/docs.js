// Starts the vendored Swagger UI; the key entered under "Authorize" stays in this browser.
"use strict";

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", paint);
paint();

// An operation is a button, and what can be pressed holds nothing else that can be: no links.
const unlinked = ({ React }) => ({
  components: { DeepLink: ({ text }) => React.createElement("span", null, text) },
});

// Headings begin below the title, all lies in a landmark, and what scrolls is reached by keyboard.
function mend() {
  for (const heading of docs.querySelectorAll(":is(h3, h4, h5):not([aria-level])")) {
    heading.ariaLevel = heading.matches(".models > h4") ? 2 : heading.tagName[1] - 1;
  }
  for (const [found, attributes] of Object.entries(MENDED)) {
    for (const element of docs.querySelectorAll(found)) {
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    }
  }
}

const MENDED = {
  ".information-container": { role: "banner" },
  ".filter-container": { role: "search" },
  ".modal-ux": { role: "dialog", "aria-modal": true, "aria-label": "Who you are" },
  ".close-modal": { "aria-label": "Close" },
  "textarea:not([aria-label])": { "aria-label": "Body" },
  "pre.microlight:not([tabindex])": { tabindex: 0 },
};

const docs = document.getElementById("docs");
new MutationObserver(mend).observe(docs, { childList: true, subtree: true });

SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  persistAuthorization: true,
  displayRequestDuration: true,
  filter: true,
  plugins: [unlinked],
  docExpansion: "none",
  defaultModelsExpandDepth: 0,
  validatorUrl: null,
});
