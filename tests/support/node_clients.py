"""Scripts of Node's clients, as those of `tests/support/python_clients.py`."""

PRELUDE = """
const { z } = require("zod");
const [url, key, model] = process.argv.slice(1);
const PERSON = "Ada is 36 years old. Write it as JSON with name and age.";
const ADDED = "What is 3 + 4? Use add.";
const Person = z.object({ name: z.string(), age: z.number().int() });
const said = {}, called = [];
const add = ({ left, right }) => { called.push([left, right]); return left + right; };
async function attempt(name, run, isLoop = false) {
  called.length = 0;
  try {
    const answer = await run();
    said[name] = isLoop ? [[...called], answer] : answer;
  } catch (error) { said[name] = { refused: `${error}`.slice(0, 600) }; }
}
"""
OPENAI = """
const OpenAI = require("openai");
const { zodResponseFormat, zodTextFormat } = require("openai/helpers/zod");
const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const parameters = { type: "object", additionalProperties: false, required: ["left", "right"],
  properties: { left: { type: "integer" }, right: { type: "integer" } } };
const tools = [{ type: "function", name: "add", strict: true, parameters }];
const chat = { model, temperature: 0, messages: [{ role: "user", content: ADDED }],
  tools: [{ type: "function", function: { name: "add", parameters, function: add, parse: JSON.parse } }] };
const person = { model, temperature: 0, messages: [{ role: "user", content: PERSON }],
  response_format: zodResponseFormat(Person, "person") };
async function loop(ask) {
  const input = [{ role: "user", content: ADDED }];
  const first = await ask({ model, input, tools, tool_choice: "required", temperature: 0 });
  const results = first.output.filter((item) => item.type === "function_call").map((call) => ({
    type: "function_call_output", call_id: call.call_id, output: `${add(JSON.parse(call.arguments))}` }));
  input.push(...first.output, ...results);
  return (await ask({ model, input, tools, temperature: 0 })).output_text;
}
(async () => {
  await attempt("chat", async () => (await client.chat.completions.parse(person)).choices[0].message.parsed);
  await attempt("chat streamed", async () =>
    (await client.chat.completions.stream(person).finalChatCompletion()).choices[0].message.parsed);
  for (const stream of [false, true])
    await attempt(`free runTools ${stream}`, () =>
      client.chat.completions.runTools({ ...chat, stream }).finalContent(), true);
  await attempt("response", async () => (await client.responses.parse({ model, input: PERSON,
    temperature: 0, text: { format: zodTextFormat(Person, "person") } })).output_parsed);
  await attempt("responses", () => loop((asked) => client.responses.create(asked)), true);
  await attempt("responses streamed", () =>
    loop((asked) => client.responses.stream(asked).finalResponse()), true);
  console.log(JSON.stringify(said));
})();
"""
AI_SDK = """
const { generateObject, generateText, streamObject, streamText, Output, tool, stepCountIs } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const openai = createOpenAI({ baseURL: url, apiKey: key });
const parameters = z.object({ left: z.number().int(), right: z.number().int() });
const forcedAtFirst = ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" });
async function streamed(asked) {
  const { partialObjectStream, object } = streamObject(asked);
  for await (const _ of partialObjectStream);
  return object;
}
(async () => {
  for (const made of [openai.chat(model), openai(model)]) {
    const how = made.provider, asked = { model: made, maxRetries: 0, temperature: 0 };
    const tools = { add: tool({ inputSchema: parameters, execute: add }) };
    const loop = { ...asked, tools, prompt: ADDED, stopWhen: stepCountIs(3), prepareStep: forcedAtFirst };
    const person = { ...asked, schema: Person, prompt: PERSON };
    await attempt(`${how} tools`, async () => (await generateText(loop)).text, true);
    await attempt(`${how} tools streamed`, async () => await streamText(loop).text, true);
    await attempt(`${how} object`, async () => (await generateObject(person)).object);
    await attempt(`${how} object streamed`, () => streamed(person));
    await attempt(`${how} output`, async () => (await generateText({
      ...asked, prompt: PERSON, output: Output.object({ schema: Person }) })).output);
  }
  console.log(JSON.stringify(said));
})();
"""
