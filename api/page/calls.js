// Calls of the service, as the page makes them.

// Never throws: {ok, status, body} or {ok: false, status, message, details}.
export async function call(method, path, body, headers = {}) {
  const options = { method, headers: { ...headers } };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  for (let triesLeft = 1; ; triesLeft -= 1) {
    try {
      const response = await fetch(path, options);
      const answer = response.status === 204 ? null : await response.json();
      if (response.ok) return { ok: true, status: response.status, body: answer };
      const error = answer.error;
      return { ok: false, status: response.status, message: error.message, details: error.details ?? [] };
    } catch {
      if (triesLeft > 0) continue;
      return { ok: false, status: 0, message: "The service does not answer; retrying.", details: [] };
    }
  }
}
