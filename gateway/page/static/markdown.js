// Output of a model as elements. It is never trusted: HTML in it is shown as text, DOMPurify cleans what marked makes
// of the rest, and pictures of other hosts become links.

import { Marked } from "./vendor/marked-18.2.1/marked.esm.js";
import DOMPurify from "./vendor/dompurify-3.4.18/purify.es.mjs";
import { copyButton, make } from "./dom.js";

const escape = (text) => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
  },
});

const CLEAN = {
  ALLOWED_TAGS: [
    ..."p br hr a strong em del code pre blockquote ul ol li h1 h2 h3 h4 h5 h6".split(" "),
    ..."table thead tbody tr th td".split(" "),
  ],
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

/** A fragment with the text's elements. */
export function render(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), CLEAN);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = make("div", { class: "table-frame", tabIndex: 0 });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) frameCode(pre);
  return fragment;
}

function frameCode(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-([\w+#.-]+)/.exec(code.className)?.[1] ?? "";
  const head = make("div", { class: "code-head" }, make("span", { textContent: language }), copyButton(() => code.textContent));
  const frame = make("div", { class: "code" }, head);
  pre.replaceWith(frame);
  pre.tabIndex = 0;
  frame.append(pre);
}
