// Vercel's AI SDK over its provider for servers that speak OpenAI's API.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { base_url: baseURL, api_key: apiKey, model: name, say } = JSON.parse(process.argv[2]);
const provider = (key) =>
  createOpenAICompatible({ name: "sixstage", baseURL, apiKey: key, includeUsage: true, supportsStructuredOutputs: true });
const model = provider(apiKey)(name);
const Trip = z.object({ city: z.string(), days: z.number().int() });
const seen = [];
const tools = {
  weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      seen.push(["weather", { city }]);
      return `21 degrees ${say.answer}`;
    },
  }),
};
const asked = { model, maxRetries: 0 };

async function stream() {
  const result = streamText({ ...asked, prompt: say.chat });
  let text = "";
  for await (const part of result.textStream) text += part;
  return [text, (await result.usage).totalTokens > 0];
}

async function toolTurns(run) {
  seen.length = 0;
  const result = await run({ ...asked, prompt: say.call, tools, stopWhen: stepCountIs(3) });
  const [text, steps] = [await result.text, await result.steps];
  return { finish: steps[0].finishReason, calls: [...seen], answer: text };
}

async function error(ask) {
  try {
    await ask();
  } catch (error) {
    return [error.statusCode, error.isRetryable, error.message.includes("maximum context length")];
  }
}

const chat = await generateText({ ...asked, prompt: say.chat });
const structured = await generateText({ ...asked, prompt: say.trip, output: Output.object({ schema: Trip }) });
console.log(JSON.stringify({
  chat: chat.text,
  stream: await stream(),
  tools: await toolTurns(generateText),
  tools_stream: await toolTurns(streamText),
  structured: structured.output,
  wrong_key: await error(() => generateText({ ...asked, model: provider("wrong")(name), prompt: "x" })),
  too_long: await error(() => generateText({ ...asked, prompt: "word ".repeat(3000) })),
}));
