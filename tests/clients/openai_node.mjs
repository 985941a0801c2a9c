// The official npm client.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { base_url: baseURL, api_key: apiKey, model, say } = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const Trip = z.object({ city: z.string(), days: z.number().int() });
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const user = (content) => [{ role: "user", content }];
const called = (calls) => calls.map(({ function: f }) => [f.name, JSON.parse(f.arguments)]);

async function stream() {
  const chunks = [];
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ model, messages: user(say.chat), ...options })) {
    chunks.push(chunk);
  }
  const text = chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.delta.content ?? "").join("");
  return [text, chunks.at(-1).usage.total_tokens > 0];
}

async function toolTurns(streamed) {
  const messages = user(say.call);
  const asked = { model, tools: [weather] };
  const completion = streamed
    ? await client.chat.completions.stream({ messages, ...asked }).finalChatCompletion()
    : await client.chat.completions.create({ messages, ...asked });
  const { message, finish_reason: finish } = completion.choices[0];
  messages.push(message);
  const [call] = message.tool_calls;
  messages.push({ role: "tool", tool_call_id: call.id, content: `21 degrees ${say.answer}` });
  const second = await client.chat.completions.create({ messages, ...asked });
  return { finish, calls: called(message.tool_calls), answer: second.choices[0].message.content };
}

// The client's own loop: it calls the function and asks again until there is an answer.
async function runTools() {
  const runner = client.chat.completions.runTools({
    model,
    messages: user(say.call),
    stream: true,
    tools: [{
      type: "function",
      function: {
        name: "weather",
        parameters: weather.function.parameters,
        parse: JSON.parse,
        function: async ({ city }) => `${city}: 21 degrees ${say.answer}`,
      },
    }],
  });
  return await runner.finalContent();
}

async function parallel() {
  const asked = { model, messages: user(say.calls), tools: [weather] };
  const completion = await client.chat.completions.stream(asked).finalChatCompletion();
  return called(completion.choices[0].message.tool_calls);
}

async function structured() {
  const completion = await client.chat.completions.parse({
    model, messages: user(say.trip), response_format: zodResponseFormat(Trip, "trip"),
  });
  return completion.choices[0].message.parsed;
}

async function responses() {
  const plain = await client.responses.create({ model, input: say.chat });
  const streamed = await client.responses.stream({ model, input: say.chat }).finalResponse();
  return [plain.output_text, streamed.output_text];
}

async function error(ask) {
  try {
    await ask();
  } catch (error) {
    return [error.constructor.name, error.status, error.code, error.type, Boolean(error.requestID)];
  }
}

const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
const chat = await client.chat.completions.create({ model, messages: user(say.chat) });
const ids = [];
for await (const entry of client.models.list()) ids.push(entry.id);
console.log(JSON.stringify({
  chat: chat.choices[0].message.content,
  stream: await stream(),
  tools: await toolTurns(false),
  tools_stream: await toolTurns(true),
  run_tools: await runTools(),
  parallel: await parallel(),
  structured: await structured(),
  responses: await responses(),
  models: ids,
  model: (await client.models.retrieve(model)).id,
  wrong_key: await error(() => stranger.models.list()),
  wrong_model: await error(() => client.models.retrieve("nobody/nothing")),
  too_long: await error(() => client.chat.completions.create({ model, messages: user("word ".repeat(3000)) })),
}));
