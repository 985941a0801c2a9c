// How the page talks to its server: fetch for everything, since an EventSource cannot send a key.

const byId = (id) => document.getElementById(id);

/** An answer that is not 200. */
class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** GET, or POST with a body as JSON.  The path is relative, so a proxy may put the server below another one. */
async function call(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem("sixstage-key");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  const answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (answer.ok) return answer;
  if (answer.status === 401) askForKey(Boolean(key));
  const said = await answer.json().catch(() => null);
  throw new ServerError(answer.status, said?.error?.message ?? `The server answered ${answer.status}.`);
}

/** The events of a stream: {type, data}, its data parsed; ends with the stream or its [DONE]. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (text + value).split("\n\n");
    text = frames.pop();
    for (const frame of frames) {
      const lines = frame.split("\n");
      const field = (name) => lines.find((line) => line.startsWith(name))?.slice(name.length);
      const data = field("data: ");
      if (data === "[DONE]") return;
      if (data === undefined) continue; // a comment that keeps the connection alive
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ServerError(200, parsed.error.message);
      yield { type: field("event: "), data: parsed };
    }
  }
}

/** Show the field for the key; whoever waits for `haveKey` goes on once there is one. */
let letIn = () => {};
let haveKey = Promise.resolve();

function askForKey(wasWrong) {
  if (!byId("door").hidden) return;
  haveKey = new Promise((resolve) => { letIn = resolve; });
  byId("door").hidden = false;
  byId("door").querySelector("p").textContent = wasWrong
    ? "The server does not know this key."
    : "It stays in this tab, and is gone when you close it.";
  byId("key").value = "";
  byId("key").focus();
}

byId("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("sixstage-key", byId("key").value.trim());
  byId("door").hidden = true;
  letIn();
});

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

function say(trouble) {
  byId("trouble").textContent = trouble;
}
