// The official Node client: `node openai_client.mjs http://127.0.0.1:8000 [model]`, in a folder where `npm install openai` was said.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

// Modules are looked for where the program is called, not where it lies.
const require = createRequire(path.join(process.cwd(), "package.json"));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));
const { VERSION } = await import(pathToFileURL(require.resolve("openai/version")));

const [url = "http://127.0.0.1:8000", model = "demo"] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "What does len do?" }];
const ANSWER = "Return the number of items in a container.";
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 12 }, age: { type: "integer", maximum: 99 } },
  required: ["name", "age"],
  additionalProperties: false,
};
const weather = {
  name: "get_weather",
  parameters: {
    type: "object",
    properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
    required: ["city"],
    additionalProperties: false,
  },
};
const chat = (more = {}, options = {}) => client.chat.completions.create({ model, messages, temperature: 0, ...more }, options);

const checks = {
  async models() {
    const ids = [];
    for await (const one of client.models.list()) ids.push(one.id);
    assert(ids.includes(model));
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  async chat() {
    const reply = await chat();
    assert.equal(reply.choices[0].message.content, ANSWER);
    assert(reply._request_id);
  },
  async chatStreamed() {
    let [text, usage] = ["", null];
    for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, ANSWER);
    assert(usage.total_tokens > 0);
  },
  async chatStreamHelper() {
    const deltas = [];
    const stream = client.chat.completions.stream({ model, messages, temperature: 0 }).on("content", (delta) => deltas.push(delta));
    assert.equal(await stream.finalContent(), ANSWER);
    assert.equal(deltas.join(""), ANSWER);
  },
  async logprobs() {
    const reply = await chat({ logprobs: true, top_logprobs: 2 });
    assert(reply.choices[0].logprobs.content.every((entry) => entry.top_logprobs.length === 2));
  },
  async completions() {
    const prompt = "<|user|>What does len do?<|end|><|assistant|>";
    const asked = { model, prompt, temperature: 0, max_tokens: 30 };
    assert.equal((await client.completions.create({ ...asked, logprobs: 1 })).choices[0].text, ANSWER);
    let text = "";
    for await (const chunk of await client.completions.create({ ...asked, stream: true })) text += chunk.choices[0].text;
    assert.equal(text, ANSWER);
  },
  async structuredOutputs() {
    const response_format = { type: "json_schema", json_schema: { name: "person", strict: true, schema } };
    const reply = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 80 });
    assert.equal(typeof JSON.parse(reply.choices[0].message.content).age, "number");
    const format = { type: "json_schema", name: "person", strict: true, schema };
    const response = await client.responses.parse({ model, input: messages, text: { format }, max_output_tokens: 80 });
    assert.equal(typeof JSON.parse(response.output_text).name, "string");
  },
  async tools() {
    const asked = { tools: [{ type: "function", function: weather }], tool_choice: "required", parallel_tool_calls: false };
    const reply = await chat({ ...asked, max_tokens: 200 });
    assert.equal(reply.choices[0].message.tool_calls[0].function.name, "get_weather");
    const stream = client.chat.completions.stream({ model, messages, ...asked, max_tokens: 200 });
    const message = await stream.finalMessage();
    assert.equal(JSON.parse(message.tool_calls[0].function.arguments).city.length, 4);
  },
  async responses() {
    const reply = await client.responses.create({ model, input: "What does len do?", temperature: 0 });
    assert.equal(reply.output_text, ANSWER);
    const stream = client.responses.stream({ model, input: "What does len do?", temperature: 0 });
    assert.equal((await stream.finalResponse()).output_text, ANSWER);
    const tool = { type: "function", strict: true, ...weather };
    const called = await client.responses.create({ model, input: messages, tools: [tool], tool_choice: "required", max_output_tokens: 200 });
    assert(called.output.some((item) => item.type === "function_call"));
  },
  async embeddings() {
    const reply = await client.embeddings.create({ model, input: ["a", "b"], dimensions: 8 });
    assert.deepEqual(reply.data.map((row) => row.embedding.length), [8, 8]);
  },
  async absentRoutes() {
    await assert.rejects(client.moderations.create({ model, input: "a" }), (error) => {
      return error instanceof OpenAI.NotFoundError && error.code === "unknown_route";
    });
  },
  async refusals() {
    const is = (kind, code, param) => (error) => {
      assert(error instanceof kind, error);
      assert.equal(error.code, code);
      assert.equal(error.param, param);
      return true;
    };
    await assert.rejects(chat({ model: "gpt-unknown" }), is(OpenAI.NotFoundError, "model_not_found", "model"));
    await assert.rejects(chat({ temperature: -3 }), is(OpenAI.BadRequestError, "invalid_value", "temperature"));
    await assert.rejects(chat({ nonsense: 1 }), is(OpenAI.BadRequestError, "unknown_parameter", "nonsense"));
    const long = chat({ messages: [{ role: "user", content: "word ".repeat(5000) }] });
    await assert.rejects(long, (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded");
  },
  async timeoutAndCancellation() {
    const endless = { ignore_eos: true, max_tokens: 900 };
    await assert.rejects(chat(endless, { timeout: 200 }), (error) => error instanceof OpenAI.APIConnectionTimeoutError);
    await assert.rejects(chat(endless, { signal: AbortSignal.timeout(100) }), (error) => error instanceof OpenAI.APIUserAbortError);
    let count = 0;
    for await (const _ of await chat({ ...endless, stream: true })) if (++count === 3) break;
    assert.equal((await chat()).choices[0].message.content, ANSWER);
  },
  async concurrentStreams() {
    const one = async () => {
      let text = "";
      for await (const chunk of await chat({ stream: true })) text += chunk.choices[0].delta.content ?? "";
      return text;
    };
    assert.deepEqual(await Promise.all(Array.from({ length: 32 }, one)), Array(32).fill(ANSWER));
  },
};

let numFailed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok   ${name}`);
  } catch (error) {
    numFailed += 1;
    console.log(`FAIL ${name}:`, error);
  }
}
console.log(`openai ${VERSION} on node ${process.versions.node}: ${Object.keys(checks).length - numFailed} passed, ${numFailed} failed`);
process.exit(numFailed > 0 ? 1 : 0);
