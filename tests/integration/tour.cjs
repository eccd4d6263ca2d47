// A tour of the API with OpenAI's client for Node: node tour.cjs BASE_URL MODEL.
// Exit code 77 when the package is not installed; NODE_PATH may say where it is.
const assert = require("node:assert/strict");

let OpenAI;
try {
  OpenAI = require("openai").OpenAI;
} catch {
  process.exit(77);
}

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 30_000 });
const messages = [{ role: "user", content: "hi" }];
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Paris", "Rom"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
// A white PNG of one pixel.
const pixel =
  "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mP8/x8AAwMCAO+ip1sAAAAASUVORK5CYII=";

async function chatAndStream() {
  const whole = await client.chat.completions.create({ model, messages, max_tokens: 10, seed: 1 });
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 10, seed: 1, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, whole.choices[0].message.content);
}

async function tools() {
  const fields = { model, messages, tools: [weather], tool_choice: "required", parallel_tool_calls: false };
  const runner = client.chat.completions.stream({ ...fields, max_tokens: 200 });
  const completion = await runner.finalChatCompletion();
  const [call] = completion.choices[0].message.tool_calls;
  assert.ok(["Paris", "Rom"].includes(JSON.parse(call.function.arguments).city));
  assert.equal(completion.choices[0].finish_reason, "tool_calls");
}

async function schemaAndVision() {
  const schema = {
    type: "object",
    properties: { ok: { type: "boolean" } },
    required: ["ok"],
    additionalProperties: false,
  };
  const content = [{ type: "image_url", image_url: { url: pixel } }, { type: "text", text: "What?" }];
  const completion = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content }],
    max_tokens: 600,
    logprobs: true,
    top_logprobs: 2,
    response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
  });
  assert.equal(typeof JSON.parse(completion.choices[0].message.content).ok, "boolean");
  assert.equal(completion.choices[0].logprobs.content[0].top_logprobs.length, 2);
}

async function responses() {
  const stream = await client.responses.create({ model, input: "hi", max_output_tokens: 5, stream: true });
  const types = [];
  for await (const event of stream) types.push(event.type);
  assert.equal(types[0], "response.created");
  assert.equal(types.at(-1), "response.incomplete");
}

async function errors() {
  await assert.rejects(client.chat.completions.create({ model: "nope", messages }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ model, messages, top_p: 2 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "top_p");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ model, messages, max_token: 2 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, "unknown_parameter");
    return true;
  });
}

(async () => {
  for (const part of [chatAndStream, tools, schemaAndVision, responses, errors]) await part();
  console.log("tour done");
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
