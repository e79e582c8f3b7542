// Ollama's official client for JavaScript; see README.md.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// Packages lie where the caller installed them, not beside this file.
const require = createRequire(pathToFileURL(process.cwd() + "/"));
const { Ollama } = await import(pathToFileURL(require.resolve("ollama")));

const [CHAT, EMBED, SCRIPTED] = ["CHAT", "EMBED", "SCRIPTED"].map((name) => process.env[`PAGEWIRE_${name}`].replace(/\/v1$/, ""));
const model = "smollm2-135m-instruct";
const messages = [{ role: "user", content: "What is the capital of France? Answer in one sentence." }];
const options = { temperature: 0, num_predict: 40 };
const add = {
  type: "function",
  function: {
    name: "add",
    description: "Adds two numbers.",
    parameters: { type: "object", required: ["a", "b"], properties: { a: { type: "number" }, b: { type: "number" } } },
  },
};

const [chat, embed, scripted] = [CHAT, EMBED, SCRIPTED].map((host) => new Ollama({ host }));
const whole = await chat.chat({ model, messages, options, keep_alive: "5m" });
assert.match(whole.message.content, /Paris/);
assert.ok(whole.done && whole.eval_count > 0 && whole.created_at instanceof Date === false);

let text = "";
for await (const part of await chat.chat({ model, messages, options, stream: true })) text += part.message.content;
assert.equal(text, whole.message.content);

const schema = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
const shaped = await chat.chat({ model, messages, options, format: schema });
assert.equal(typeof JSON.parse(shaped.message.content).name, "string");

text = "";
for await (const part of await chat.generate({ model, prompt: "Hello", options, stream: true })) text += part.response;
assert.equal(text, (await chat.generate({ model, prompt: "Hello", options })).response);

const question = [{ role: "user", content: "What is 2 + 3?" }];
const called = await scripted.chat({ model: "scripted", messages: question, tools: [add], think: true });
const [call] = called.message.tool_calls;
assert.deepEqual(call.function.arguments, { a: 2, b: 3 });
assert.equal(called.message.thinking.trim(), "A tool.");
const reply = [...question, called.message, { role: "tool", content: "5", tool_name: "add" }];
assert.equal((await scripted.chat({ model: "scripted", messages: reply, tools: [add] })).message.content, "It is 5.");

assert.deepEqual((await chat.list()).models.map((one) => one.name), [`${model}:latest`]);
assert.deepEqual((await chat.ps()).models.map((one) => one.model), [`${model}:latest`]);
assert.deepEqual((await chat.show({ model })).capabilities, ["completion"]);
const vectors = await embed.embed({ model: "all-minilm-l6-v2", input: ["a", "b"] });
assert.deepEqual(vectors.embeddings.map((one) => one.length), [384, 384]);
let last;
for await (const part of await chat.pull({ model, stream: true })) last = part.status;
assert.equal(last, "success");
assert.equal(typeof (await chat.version()).version, "string");

await assert.rejects(chat.chat({ model: "nobody", messages }), (error) => error.status_code === 404);
await assert.rejects(chat.chat({ model, messages, tools: [add] }), /does not support tools/);
await assert.rejects(chat.delete({ model }), (error) => error.status_code === 501);

const stopped = await chat.chat({ model, messages, options: { ...options, num_predict: 2000, seed: 1 }, stream: true });
try {
  for await (const part of stopped) stopped.abort();
  assert.fail("it went on");
} catch (error) {
  assert.equal(error.name, "AbortError");
}
console.log("ollama for JavaScript: ok");
