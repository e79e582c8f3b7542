// Conversations that are too long for the model: the oldest turns are left out, as in `pagewire chat`.

import { request } from "./api.js";

// 1 / SHARE_OF_ANSWER of the tokens is kept free for an answer, or fewer if fewer are requested.
const SHARE_OF_ANSWER = 4;

/**
 * Returns how many of the oldest messages of `said` ({role, content}) are left out, so that the others and an answer of
 * `maxTokens` fit, and the limit of the model in tokens: {leftOut, limit}. The rest begins with a message of the user.
 * The server refuses a question that alone does not fit. Throws as request() does.
 */
export async function makeRoom(model, system, said, maxTokens, signal) {
  const starts = said.map(({ role }, index) => (role === "user" ? index : -1)).filter((index) => index > 0);
  let leftOut = 0, limit = 0;
  const fits = async (from) => {
    const body = { model, messages: [...system, ...said.slice(from)] };
    const tokens = await (await request("tokenize", { body, signal })).json();
    limit = tokens.max_model_len;
    const share = Math.floor(limit / SHARE_OF_ANSWER);
    return !limit || tokens.count <= limit - Math.min(maxTokens ?? share, share) || (from === said.length - 1 && tokens.count < limit);
  };
  if (!starts.length || (await fits(0))) return { leftOut, limit };
  let [low, high] = [0, starts.length]; // the first start that fits is within these; `high` means none
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fits(starts[middle])) high = middle;
    else low = middle + 1;
  }
  if (low < starts.length) leftOut = starts[low];
  return { leftOut, limit };
}
