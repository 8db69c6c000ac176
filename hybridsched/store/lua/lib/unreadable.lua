-- Functions for --@include after entries and answer; no script by itself. Reads neither KEYS nor ARGV.
-- Returns: see each function.
--
-- Entries that accept.lua would not write. Whoever can write to Redis can add them, so none may hold up others.
local MOST_TOKENS, MOST_MS, MOST_ATTEMPTS = 1e9, 1e15, 1e6
local NEEDED, TIMES = {'path', 'body', 'stream', 'reply'}, {'deadline_ms', 'accepted_ms'}

-- NaN fails both comparisons. Lua reads hexadecimal numbers, other languages do not.
local function number_within(text, least, most)
  local n = text and not string.find(text, '[xX]') and tonumber(text)
  return n and n >= least and n <= most
end

-- What is wrong with a request's id, as a sentence, or with its estimates; nil when nothing is. The id goes into
-- an HTTP header.
local function unusable(id, cost, prompt_tokens)
  if not id or #id > 200 or not string.find(id, '^[!-z|~]+$') then
    return 'its id must be 1 to 200 printable ASCII characters without spaces and braces'
  elseif not number_within(cost, 0, MOST_TOKENS) then
    return 'its cost must be a number from 0 to 1000000000'
  elseif not number_within(prompt_tokens, 0, MOST_TOKENS) then
    return 'its prompt_tokens must be a number from 0 to 1000000000'
  end
  return nil
end

-- An entry's fields by name. Of a name that stands twice the first counts, as in `field`.
local function fields_of(flat)
  local found = {}
  for i = #flat - 1, 1, -2 do
    found[flat[i]] = flat[i + 1]
  end
  return found
end

-- What keeps an entry from being run, as a sentence; nil when nothing does.
local function unreadable(fields)
  local why = unusable(fields.id, fields.cost, fields.prompt_tokens)
  if why then
    return why
  end
  for _, name in ipairs(NEEDED) do
    if (fields[name] or '') == '' then
      return 'it has no ' .. name
    end
  end
  for _, name in ipairs(TIMES) do
    if not number_within(fields[name], 0, MOST_MS) then
      return 'its ' .. name .. ' must be a time in ms'
    end
  end
  if not string.find(fields.attempt or '', '^%d+$') or not number_within(fields.attempt, 1, MOST_ATTEMPTS) then
    return 'its attempt must be a whole number from 1'
  end
  return nil
end

-- Take such an entry off the stream and say so where it wants its answer. Its id may be that of another
-- request, whose hash is left alone.
local function drop_unreadable(keys, entry, flat, why, limits)
  redis.call('XACK', keys.stream, GROUP, entry)
  redis.call('XDEL', keys.stream, entry)
  local result = failure('failed', 'bad_request', 'the queue holds no request that can be run here: ' .. why, 400)
  if on_any_type('HGET', keys.req, 'entry') == entry then
    redis.call('HSET', keys.req, 'state', 'done', 'result', result)
    redis.call('PEXPIRE', keys.req, limits.keep_ms)
  end
  if (field(flat, 'reply') or '') ~= '' then
    local attempt = string.match(field(flat, 'attempt') or '', '^%d%d?%d?$') or '1'
    for _, reply in ipairs(keys.replies) do
      tell(keys.req, reply, limits, 'id', field(flat, 'id') or '', 'attempt', attempt, 'groups', '0', 'end', result)
    end
  end
end
