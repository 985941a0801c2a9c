// Real traffic from this page: a chat, and crowds, all through the endpoints that any client uses.
// A browser opens six connections to a server at most, so a crowd's chats are put through its own template
// (/tokenize) and sent as a few calls of many prompts each (/v1/completions).

const QUESTIONS = [
  "Why is the sky blue?", "Name three kinds of cheese.", "What does a lighthouse keeper do?",
  "How do bees find their way home?", "Write a line about the sea.", "What is a prime number?",
  "Who invented the bicycle?", "How do I boil an egg?", "Tell me a fact about owls.",
  "What is the capital of Norway?", "Why do cats purr?", "Explain rain to a child.",
  "What is a good name for a dog?", "How far away is the moon?", "Give me a word that rhymes with light.",
  "What makes bread rise?", "How does a key open a lock?", "Describe a forest in the morning.",
  "What is the longest river?", "Why do leaves fall in autumn?", "How do magnets work?",
  "Invent a superhero.", "What is in the middle of the Earth?", "How do I learn to juggle?",
];
const TASKS = [
  "A reader asks for the opening hours.", "A book about bridges is overdue by three weeks.",
  "Someone left an umbrella at desk two.", "A school class wants to visit on Tuesday.",
  "The printer is out of paper.", "A reader wants to reserve a room for six people.",
  "A child has lost its card.", "Someone offers forty old atlases as a gift.",
  "The catalogue lists a novel twice.", "A reader wants to borrow eleven books.",
  "The lift does not move.", "A journalist asks about the oldest book in the house.",
];
const RULES = [
  "You work at the front desk of a city library, and every message is a note from a colleague.",
  "Answer with the next thing that should be done, in two short sentences.",
  "Opening hours are nine to seven on weekdays, ten to four on Saturdays, and never on Sundays.",
  "A card costs nothing for children and twelve a year for everybody else.",
  "Ten items can be borrowed at a time, four of which may be films.",
  "Items are due after four weeks, and can be extended twice unless somebody waits for them.",
  "A late item costs twenty cents a day, and never more than its price.",
  "Rooms are for two to eight people, and can be reserved up to a month ahead.",
  "Groups of more than ten are led by somebody of the house; ask upstairs for a date.",
  "Gifts are welcome if they are younger than ten years, or older than a hundred.",
  "What is found goes into the grey cupboard, with a note of the day and the place.",
  "After three months it goes to the city's own office for lost things.",
  "Machines that do not work get a red sign, and the house technician a call.",
  "Questions of the press go to the director, and to nobody else.",
  "Mistakes in the catalogue are written down in the blue book beside the screen.",
  "Speak plainly, promise nothing that is not in these rules, and stay kind.",
];

let traffic = null; // an AbortController while something runs

/** A block of the conversation: who speaks, and the element whose text grows. */
function speak(who, text = "") {
  const turn = document.createElement("div");
  turn.className = `turn ${who}`;
  turn.textContent = text;
  byId("chat").querySelector(".hint")?.remove();
  byId("chat").append(turn);
  follow();
  return turn;
}

function follow() {
  byId("chat").scrollTop = byId("chat").scrollHeight;
}

const conversation = [];

async function chat(question) {
  conversation.push({ role: "user", content: question });
  speak("user", question);
  const turn = speak("model");
  turn.classList.add("busy");
  try {
    const body = { messages: conversation, stream: true, max_tokens: Math.min(200, roomFor(0)) };
    for await (const { data } of events(await call("v1/chat/completions", { body }))) {
      turn.textContent += data.choices[0]?.delta?.content ?? "";
      follow();
    }
    conversation.push({ role: "assistant", content: turn.textContent });
  } catch (error) {
    conversation.pop();
    turn.textContent ||= "(no answer)";
    say(error.message);
  } finally {
    turn.classList.remove("busy");
  }
}

/** A folded list of questions whose answers grow; `answered` counts up. */
function card(title, questions) {
  const box = document.createElement("details");
  box.className = "card";
  const summary = box.appendChild(document.createElement("summary"));
  const list = box.appendChild(document.createElement("ol"));
  const answers = questions.map((question) => {
    const item = list.appendChild(document.createElement("li"));
    item.appendChild(document.createElement("b")).textContent = question;
    return item.appendChild(document.createElement("span"));
  });
  let answered = 0;
  const count = (more) => {
    answered += more;
    summary.textContent = `${title}: ${answered} of ${questions.length} answered`;
  };
  count(0);
  byId("chat").querySelector(".hint")?.remove();
  byId("chat").append(box);
  follow();
  return { answers, count };
}

const tokenize = async (messages, signal) =>
  (await (await call("tokenize", { body: { messages }, signal })).json()).tokens;

/** Send conversations in waves of these sizes, each wave one call; returns when all are answered. */
async function sendWaves(title, conversations, signal, sizes, seconds) {
  const shown = card(title, conversations.map((messages) => messages.at(-1).content));
  const prompts = [];
  for (const messages of conversations) prompts.push(await tokenize(messages, signal));
  const longest = Math.max(...prompts.map((prompt) => prompt.length));
  const max_tokens = Math.min(60, roomFor(longest));
  const send = async (size, wave) => {
    const first = sizes.slice(0, wave).reduce((sum, before) => sum + before, 0);
    await pause(wave * seconds);
    const body = { prompt: prompts.slice(first, first + size), stream: true, temperature: 0.8, max_tokens };
    for await (const { data } of events(await call("v1/completions", { body, signal }))) {
      for (const choice of data.choices) {
        shown.answers[first + choice.index].textContent += choice.text;
        if (choice.finish_reason) shown.count(1);
      }
    }
  };
  await Promise.all(sizes.map(send));
}

async function crowd(signal) {
  const chats = QUESTIONS.map((content) => [{ role: "user", content }]);
  await sendWaves(`${chats.length} users`, chats, signal, [8, 8, 8], 0.5);
}

/** All agents begin with the same rules: as many of them as leave half of the context free.  One comes first:
    what is still being computed cannot be found. */
async function agents(signal) {
  let rules = RULES;
  const talk = (task) => [{ role: "system", content: rules.join("\n") }, { role: "user", content: task }];
  while (rules.length > 1 && (await tokenize(talk(TASKS[0]), signal)).length > roomFor(0) / 2) {
    rules = rules.slice(0, rules.length / 2);
  }
  await sendWaves(`${TASKS.length} agents`, TASKS.map(talk), signal, [1, 5, 6], 1);
}

async function beams(signal) {
  const question = "Finish this sentence: The old lighthouse stood";
  const body = {
    messages: [{ role: "user", content: question }], n: 4, use_beam_search: true,
    max_tokens: Math.min(40, roomFor(0)),
  };
  const shown = card("4 beams", ["First", "Second", "Third", "Fourth"]);
  const answer = await (await call("v1/chat/completions", { body, signal })).json();
  for (const choice of answer.choices) {
    shown.answers[choice.index].textContent = choice.message.content;
    shown.count(1);
  }
}

/** Run one kind of traffic at a time; "Stop" closes its connections, which takes the requests back. */
async function run(kind) {
  say("");
  traffic = new AbortController();
  setBusy(true);
  try {
    await kind(traffic.signal);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
    traffic.abort(); // of several calls the others
  } finally {
    traffic = null;
    setBusy(false);
  }
}

function setBusy(busy) {
  for (const id of ["crowd", "agents", "beams"]) byId(id).disabled = busy;
  byId("stop").disabled = !busy;
}

for (const [id, kind] of Object.entries({ crowd, agents, beams })) {
  byId(id).addEventListener("click", () => run(kind));
}
byId("stop").addEventListener("click", () => traffic?.abort());
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (!question) return;
  byId("question").value = "";
  say("");
  chat(question);
});
