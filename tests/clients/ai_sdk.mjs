// Vercel's AI SDK, by both of its providers. Needs npm packages; see README.md.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// Packages lie where the caller installed them, not beside this file.
const require = createRequire(pathToFileURL(process.cwd() + "/"));
const load = async (name) => import(pathToFileURL(require.resolve(name)));
const { APICallError, embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const { PAGEWIRE_CHAT: CHAT, PAGEWIRE_EMBED: EMBED, PAGEWIRE_SCRIPTED: SCRIPTED } = process.env;
const MODEL = "smollm2-135m-instruct";
const prompt = "What is the capital of France? Answer in one sentence.";
const city = z.object({ name: z.string(), country: z.string(), size: z.enum(["small", "large"]) });
const common = { maxRetries: 0, temperature: 0, maxOutputTokens: 60 };
const tools = {
  add: tool({
    description: "Adds two numbers.",
    inputSchema: z.object({ a: z.number(), b: z.number() }),
    execute: async ({ a, b }) => String(a + b),
  }),
};

const compatible = (baseURL) =>
  createOpenAICompatible({ name: "pagewire", baseURL, apiKey: "any", includeUsage: true, supportsStructuredOutputs: true });
const official = (baseURL) => createOpenAI({ baseURL, apiKey: "any" });
const providers = {
  compatible: (url, model) => compatible(url).chatModel(model),
  official: (url, model) => official(url).chat(model),
  responses: (url, model) => official(url).responses(model),
};

for (const [name, chat] of Object.entries(providers)) {
  const model = chat(CHAT, MODEL);
  const whole = await generateText({ model, prompt, ...common });
  assert.match(whole.text, /Paris/);
  assert.equal(whole.finishReason, "stop");
  assert.ok(whole.usage.inputTokens > 0 && whole.usage.outputTokens > 0);

  const stream = streamText({ model, system: "You are helpful.", messages: [{ role: "user", content: prompt }], ...common });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.ok(text.length > 0);
  assert.equal(await stream.finishReason, "stop");
  assert.ok((await stream.usage).outputTokens > 0);

  const { object } = await generateObject({ model, schema: city, prompt, ...common });
  city.parse(object);
  const objects = streamObject({ model, schema: city, prompt, ...common });
  for await (const partial of objects.partialObjectStream) assert.equal(typeof partial, "object");
  city.parse(await objects.object);

  const forced = await generateText({ model, prompt, tools, toolChoice: "required", ...common });
  assert.equal(forced.toolCalls[0].toolName, "add");
  const named = await generateText({ model, prompt, tools, toolChoice: { type: "tool", toolName: "add" }, ...common });
  assert.equal(named.toolCalls[0].toolName, "add");

  const question = { prompt: "What is 2 + 3?", tools, stopWhen: stepCountIs(3), maxRetries: 0 };
  const agent = await generateText({ model: chat(SCRIPTED, "scripted"), ...question });
  assert.equal(agent.text, "It is 5.");
  assert.deepEqual(agent.steps[0].toolCalls[0].input, { a: 2, b: 3 });
  const kinds = new Set();
  let answer = "";
  for await (const part of streamText({ model: chat(SCRIPTED, "scripted"), ...question }).fullStream) {
    assert.notEqual(part.type, "error", part.error);
    kinds.add(part.type);
    if (part.type === "text-delta") answer += part.text;
  }
  assert.equal(answer, "It is 5.");
  for (const kind of ["tool-input-delta", "tool-call", "tool-result", "finish"]) assert.ok(kinds.has(kind), kind);
  if (name === "compatible") assert.ok(kinds.has("reasoning-delta"), "reasoning");

  await assert.rejects(generateText({ model: chat(CHAT, "nobody"), prompt, maxRetries: 0 }), (error) => {
    assert.ok(APICallError.isInstance(error), error);
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /the model 'nobody' does not exist/);
    return true;
  });
  console.log(`ai: ${name} ok`);
}

const completion = await generateText({
  model: compatible(CHAT).completionModel(MODEL), prompt: "The capital of France is", maxOutputTokens: 8, temperature: 0,
});
assert.match(completion.text, /Paris/);
for (const embedding of [compatible(EMBED).textEmbeddingModel("all-minilm-l6-v2"), official(EMBED).embedding("all-minilm-l6-v2")]) {
  const { embeddings, usage } = await embedMany({ model: embedding, values: ["one", "two"] });
  assert.deepEqual(embeddings.map((vector) => vector.length), [384, 384]);
  assert.ok(usage.tokens > 0);
}
console.log("ai: completion, embeddings ok");
