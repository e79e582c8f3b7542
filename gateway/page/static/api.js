// The gateway: requests with the key, and streams of server-sent events. (EventSource cannot send a key.)

import { byId } from "./dom.js";

const KEY = "pagewire.key";

/** An error from the server, with its message. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let asking = null;

/** Asks the user for the key, once for all requests that lack it. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    if (sessionStorage.getItem(KEY)) byId("key-message").textContent = "The key is wrong or no longer valid.";
    dialog.addEventListener("close", () => {
      const key = byId("key").value.trim();
      byId("key").value = "";
      if (key) sessionStorage.setItem(KEY, key);
      asking = null;
      resolve(Boolean(key));
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** fetch() with the key. Throws ApiError if the answer is an error, TypeError if there is none. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const method = body === undefined ? "GET" : "POST";
    const response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
    if (response.ok) return response;
    const message = await messageOf(response);
    if (response.status !== 401 || !(await askForKey())) throw new ApiError(message, response.status);
  }
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

/** The events of a response, parsed. Throws ApiError if one is an error. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") continue;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
