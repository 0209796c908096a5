"""Scripts of Python clients: each says by case the person that it got, or its calls of `add` and the last
text. A case that fails says what was `refused`.

In a case called `free` the client forces no form: the model answers what it likes. What the scripts are given
is in `tests/support/sdk_scripts.py`.
"""

PRELUDE = """
import asyncio, json, sys
from pydantic import BaseModel

url, key, model = sys.argv[1:]
PERSON = "Ada is 36 years old. Write it as JSON with name and age."
ADDED = "What is 3 + 4? Use add."
PARAMETERS = {"type": "object", "required": ["left", "right"], "additionalProperties": False,
              "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}}}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
person, added = ([{"role": "user", "content": text}] for text in (PERSON, ADDED))
said, called = {}, []
events = asyncio.new_event_loop()  # a client's connections are of one loop

class Person(BaseModel):
    name: str
    age: int

def add(left: int, right: int) -> int:
    "Adds two numbers."
    called.append([left, right])
    return left + right

def case(name, run, is_loop=False):
    called.clear()
    try:
        answer = run()
        said[name] = [list(called), answer] if is_loop else answer
        if isinstance(answer, BaseModel):
            said[name] = answer.model_dump()
    except Exception as error:
        said[name] = {"refused": f"{type(error).__name__}: {error}"[:600]}
"""
ANTHROPIC = """
from anthropic import Anthropic

client = Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)
asked = {"model": model, "max_tokens": 200, "extra_body": {"temperature": 0}}
tools = [{"name": "add", "input_schema": PARAMETERS}]

def answered(is_stream, **fields):
    if not is_stream:
        return client.messages.create(tools=tools, **asked, **fields)
    with client.messages.stream(tools=tools, **asked, **fields) as stream:
        return stream.get_final_message()

def loop(is_stream, **choice):
    first = answered(is_stream, messages=added, **choice)
    assert first.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": each.id, "content": str(add(**each.input))}
               for each in first.content if each.type == "tool_use"]
    messages = [*added, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = answered(is_stream, messages=messages)
    assert last.stop_reason == "end_turn"
    return last.content[0].text

for is_stream in (False, True):
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}, {"type": "auto"}):
        free = "free " * (choice["type"] == "auto")
        case(f"{free}{choice['type']} {is_stream}", lambda: loop(is_stream, tool_choice=choice), is_loop=True)
case("parse", lambda: client.messages.parse(messages=person, output_format=Person, **asked).parsed_output)
print(json.dumps(said))
"""
AGENTS = """
import agents
from agents import Agent, ModelSettings, Runner, function_tool
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)

async def streamed(agent, asked):
    result = Runner.run_streamed(agent, asked)
    async for _ in result.stream_events():
        pass
    return result

def run(asked, forced=None, is_stream=False, **fields):
    agent = Agent(name="first", model=engine, **fields,
                  model_settings=ModelSettings(temperature=0, tool_choice=forced))
    result = events.run_until_complete(streamed(agent, asked) if is_stream else Runner.run(agent, asked))
    assert result.last_agent.name == ("helper" if "handoffs" in fields else "first")
    return result.final_output

for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
    engine = kind(model, client)
    helper = Agent(name="helper", model=engine, model_settings=ModelSettings(temperature=0))
    for is_stream in (False, True):
        how = f"{kind.__name__} {is_stream}"
        case(f"free {how}", lambda: run(ADDED, None, is_stream, tools=[function_tool(add)]), is_loop=True)
        case(f"{how} tool", lambda: run(ADDED, "add", is_stream, tools=[function_tool(add)]), is_loop=True)
        case(f"{how} handoff", lambda: run("Hello", "required", is_stream, handoffs=[helper]))
    case(f"{kind.__name__} output", lambda: run(PERSON, output_type=Person))
print(json.dumps(said))
"""
HAYSTACK = """
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

tool = create_tool_from_function(add)

def generator(**wanted):
    return OpenAIChatGenerator(api_key=Secret.from_token(key), api_base_url=url, model=model, max_retries=0,
                               generation_kwargs={"temperature": 0} | wanted)

def forced(callback):
    messages = [ChatMessage.from_user(ADDED)]
    first = generator(tool_choice="required").run(messages, tools=[tool], streaming_callback=callback)
    (reply,) = first["replies"]
    results = [ChatMessage.from_tool(str(add(**call.arguments)), origin=call) for call in reply.tool_calls]
    return generator().run([*messages, reply, *results], tools=[tool])["replies"][0].text

def agent():
    made = Agent(chat_generator=generator(), tools=[tool], max_agent_steps=3)
    return made.run(messages=[ChatMessage.from_user(ADDED)])["last_message"].text

def parsed():
    answer = generator(response_format=Person).run([ChatMessage.from_user(PERSON)])["replies"][0]
    return Person.model_validate_json(answer.text)

case("tool", lambda: forced(None), is_loop=True)
case("tool streamed", lambda: forced(lambda chunk: None), is_loop=True)
case("free agent", agent, is_loop=True)
case("schema", parsed)
print(json.dumps(said))
"""
INSTRUCTOR = """
import instructor, typing
from instructor import Mode
from openai import OpenAI

def person_in(mode):
    client = instructor.from_openai(OpenAI(base_url=url, api_key=key, max_retries=0), mode=mode)
    asked = {"model": model, "max_retries": 0, "temperature": 0}
    if mode.name.startswith("RESPONSES"):
        return client.responses.create(input=PERSON, response_model=Person, **asked)
    kind = typing.Iterable[Person] if mode is Mode.PARALLEL_TOOLS else Person
    answer = client.chat.completions.create(messages=person, response_model=kind, **asked)
    return next(iter(answer)) if mode is Mode.PARALLEL_TOOLS else answer

for mode in (Mode.TOOLS, Mode.PARALLEL_TOOLS, Mode.JSON, Mode.JSON_SCHEMA, Mode.MD_JSON, Mode.RESPONSES_TOOLS,
             Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS):
    free = "free " * (mode in (Mode.PARALLEL_TOOLS, Mode.JSON, Mode.MD_JSON))
    case(free + mode.name, lambda: person_in(mode))
print(json.dumps(said))
"""
LANGGRAPH = """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

def loop(is_response, is_stream):
    made = ChatOpenAI(base_url=url, api_key=key, model=model, max_retries=0, temperature=0,
                      use_responses_api=is_response)
    agent = create_react_agent(made, [tool(add)])
    if not is_stream:
        return str(agent.invoke({"messages": added})["messages"][-1].text)
    pieces = [piece for piece, _ in agent.stream({"messages": added}, stream_mode="messages")]
    return "".join(str(piece.text) for piece in pieces if piece.type.startswith("AI"))

for is_response in (False, True):
    for is_stream in (False, True):
        case(f"free {is_response} {is_stream}", lambda: loop(is_response, is_stream), is_loop=True)
print(json.dumps(said))
"""
LITELLM = """
import litellm

of = {"openai": {"api_base": url, "api_key": key},
      "anthropic": {"api_base": url.removesuffix("/v1"), "api_key": key}}

def completion(messages, is_stream=False, **more):
    answer = litellm.completion(model=f"{provider}/{model}", messages=messages, max_tokens=200, temperature=0,
                                stream=is_stream, **more, **of[provider])
    answer = litellm.stream_chunk_builder(list(answer)) if is_stream else answer
    return answer.choices[0].message

def loop(is_stream):
    first = completion(added, is_stream, tools=[FUNCTION], tool_choice="required")
    results = [{"role": "tool", "tool_call_id": call.id,
                "content": str(add(**json.loads(call.function.arguments)))} for call in first.tool_calls]
    return completion([*added, first, *results], is_stream, tools=[FUNCTION]).content

async def messages(is_stream):
    answer = await litellm.anthropic.messages.acreate(
        model=f"{provider}/{model}", max_tokens=200, messages=added, temperature=0, stream=is_stream,
        tools=[{"name": "add", "input_schema": PARAMETERS}], tool_choice={"type": "any"}, **of[provider])
    if not is_stream:
        return str(add(**answer["content"][0]["input"]))
    lines = b"".join([each async for each in answer]).decode().splitlines()
    deltas = [json.loads(line[5:]).get("delta", {}) for line in lines if line.startswith("data:")]
    return str(add(**json.loads("".join(delta.get("partial_json", "") for delta in deltas))))

def response():
    answer = litellm.responses(model=f"openai/{model}", input=added, temperature=0, tool_choice="required",
        tools=[{"type": "function", "name": "add", "parameters": PARAMETERS}], **of["openai"])
    return str(add(**json.loads(answer.output[0].arguments)))

for provider in of:
    for is_stream in (False, True):
        how = f"{provider} {is_stream}"
        case(f"{how} tool", lambda: loop(is_stream), is_loop=True)
        case(f"{how} messages", lambda: events.run_until_complete(messages(is_stream)), is_loop=True)
    case(f"{provider} schema", lambda: Person.model_validate_json(
        completion(person, response_format=Person).content))
case("response", response, is_loop=True)
print(json.dumps(said))
"""
LLAMA_INDEX = """
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

tool = FunctionTool.from_defaults(add)

def made(**more):
    return OpenAILike(model=model, api_base=url, api_key=key, is_chat_model=True, temperature=0,
                      is_function_calling_model=True, context_window=2048, max_retries=0, **more)

def forced(is_stream):
    asked = {"tools": [tool], "user_msg": ADDED, "tool_required": True}
    answer = [*made().stream_chat_with_tools(**asked)][-1] if is_stream else made().chat_with_tools(**asked)
    return str([add(**call.tool_kwargs) for call in made().get_tool_calls_from_response(answer)][0])

async def agent():
    return str(await FunctionAgent(tools=[tool], llm=made()).run(ADDED))

def structured(**more):
    return made(**more).as_structured_llm(Person).chat([ChatMessage(PERSON)]).raw

case("tool", lambda: forced(False), is_loop=True)
case("tool streamed", lambda: forced(True), is_loop=True)
case("free agent", lambda: events.run_until_complete(agent()), is_loop=True)
case("structured by a tool", structured)
case("structured by a schema", lambda: structured(should_use_structured_outputs=True))
print(json.dumps(said))
"""
PYDANTIC_AI = """
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

def run(kind, asked, **fields):
    made = kind(model, provider=OpenAIProvider(base_url=url, api_key=key))
    return Agent(made, retries=0, model_settings={"temperature": 0}, **fields).run_sync(asked).output

for kind in (OpenAIChatModel, OpenAIResponsesModel):
    for output in (ToolOutput, NativeOutput, PromptedOutput):
        free = "free " * (output is PromptedOutput)
        how = f"{free}{kind.__name__} {output.__name__}"
        case(how, lambda: run(kind, PERSON, output_type=output(Person)))
    case(f"free {kind.__name__} tools", lambda: run(kind, ADDED, tools=[add]), is_loop=True)
print(json.dumps(said))
"""
