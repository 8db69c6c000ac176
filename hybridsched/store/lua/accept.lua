-- Accept online requests, each id once; a repeat attaches to the first. Several at once cost one call.
--
-- A repeat (same id, model, class, path, body and stream flag) waits beside the first, each with its own deadline
-- and its own reply stream. A request with a used id and anything else in it is a conflict.
-- Everything made here has an end: hashes and queues outlive the last deadline by the keeping time.
--
-- KEYS, four for each request: its hash (req:ID), the stream of its model and priority, its reply stream, the
--   replicas hash of its model. They must be the pool's own keys of these names, or the request is refused.
-- ARGV 1 prefix of the pool's keys ("hs:{POOL}:")   2 how long a hash outlives the deadline, ms
--      3 retry budget (repeats of one id that attach)   4 life of a reply stream after its last entry, ms
--      5 MAXLEN of a reply stream (approximate)
--   then nine for each request: id, path, body, stream (0/1), timeout_ms, cost (tokens), prompt_tokens,
--   priority, most unclaimed requests that may stand in its stream before it (0: no limit).
-- Returns, for each request, {word, entry id, live replicas of its model}: accepted | attached (runs or waits; its
--   answer comes to this reply stream too) | done (the kept result was sent to this reply stream) | stream_gap (part
--   of its stream has been sent to others and is not kept; nothing was done) | conflict (the id stands for another
--   request, which was left alone) | retry_budget_exhausted | queue_full | refused (with the reason in place of the
--   entry id).
-- Publishes `wake` to the least loaded live replica of each model.
--@include clock
--@include entries
--@include replicas
--@include answer
--@include unreadable

local LONGEST_MS = 30 * 86400 * 1000
local FORGET_AT_ONCE = 16

local prefix, keep_ms, budget = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local limits = {reply_ttl_ms = ARGV[4], maxlen = ARGV[5]}
local now = clock_ms()
local before_model = prefix .. 'replicas:'
local results, fresh, asked = {}, {}, {}
local NAMES = {'entry', 'result', 'attempt', 'sha', 'reply', 'until', 'deadline_ms', 'emitted', 'stream'}

local function why_refused(req, stream, reply, replicas, id, timeout_ms, priority)
  local model = string.sub(replicas, #before_model + 1)
  if req ~= prefix .. 'req:' .. id or id == '' then
    return 'the first key must be ' .. prefix .. 'req:' .. id
  elseif string.sub(replicas, 1, #before_model) ~= before_model or model == '' then
    return 'the fourth key must be ' .. prefix .. 'replicas:MODEL'
  elseif not string.find(priority, '^[012]$') or stream ~= prefix .. 'online:' .. model .. ':' .. priority then
    return 'the second key must be ' .. prefix .. 'online:' .. model .. ':CLASS, with class 0, 1 or 2'
  elseif not is_reply(req, reply) then
    return 'the third key must be a reply stream, ' .. prefix .. 'reply:NAME'
  elseif not (timeout_ms and timeout_ms >= 0 and timeout_ms <= LONGEST_MS) then
    return 'timeout_ms must be a number from 0 to ' .. LONGEST_MS
  end
  return nil
end

-- What is known of a used id, and whether `reply` is among those that wait for it. A hash whose request nobody will
-- ever run or answer goes: its queue has expired, or somebody wrote it by hand.
local function look(req, state, stream, reply)
  local known, listed = {state = state}, false
  for place, value in ipairs(redis.call('HMGET', req, unpack(NAMES))) do
    known[NAMES[place]] = value or nil
  end
  local stands = known.result
  if state ~= 'done' then
    -- One of another class or model has its entry in a stream that is not ours to read: it is a conflict.
    local found = known.stream == stream and redis.pcall('XRANGE', stream, known.entry or '', known.entry or '')
    stands = not found or not found.err and #found > 0
  end
  if not (stands and known.entry and known.reply) then
    redis.call('DEL', req)
    return {}, false
  end
  for _, key in ipairs(words(known.reply)) do
    listed = listed or key == reply
  end
  return known, listed
end

-- How often the id was sent again, with this time.
local function repeats(req)
  local count = redis.pcall('HINCRBY', req, 'retries', 1)
  return type(count) == 'number' and count or math.huge
end

local function live_longer(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, math.ceil(ms))
  end
end

-- Let one more wait for a known request, or the same one for longer.
local function attach(req, stream, reply, known, deadline, timeout_ms)
  local replies, untils = words(known.reply), words(known['until'])
  local place = #replies + 1
  for i, key in ipairs(replies) do
    if key == reply then
      place = i
    end
  end
  replies[place] = reply
  untils[place] = string.format('%.3f', math.max(deadline, tonumber(untils[place] or '') or 0))
  local last = math.max(deadline, tonumber(known.deadline_ms or '') or 0)
  redis.call('HSET', req, 'reply', table.concat(replies, ' '), 'until', table.concat(untils, ' '),
    'deadline_ms', string.format('%.3f', last))
  live_longer(req, timeout_ms + keep_ms)
  live_longer(stream, timeout_ms + keep_ms)
end

-- With no worker there is nobody who answers what has expired: what its clients have long given up goes.
local function forget_expired(stream)
  for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+', 'COUNT', FORGET_AT_ONCE)) do
    local deadline = tonumber(field(entry[2], 'deadline_ms') or '') or tonumber(string.match(entry[1], '^%d+'))
    if deadline + keep_ms <= now then
      local held = redis.pcall('XPENDING', stream, GROUP, entry[1], entry[1], 1)
      if held.err or #held == 0 then
        redis.call('XDEL', stream, entry[1])
      end
    end
  end
end

for i = 0, #KEYS / 4 - 1 do
  local req, stream, reply, replicas = KEYS[4 * i + 1], KEYS[4 * i + 2], KEYS[4 * i + 3], KEYS[4 * i + 4]
  local a = 5 + 9 * i
  local id, timeout_ms, limit = ARGV[a + 1], tonumber(ARGV[a + 5]), tonumber(ARGV[a + 9]) or 0
  local refused = why_refused(req, stream, reply, replicas, id, timeout_ms, ARGV[a + 8])
    or unusable(id, ARGV[a + 6], ARGV[a + 7])
  local state = not refused and on_any_type('HGET', req, 'state')
  if not refused and state == nil then
    refused = req .. ' holds another type than a hash'
  end
  if refused then
    results[i + 1] = {'refused', refused, 0}
  else
    local sha = redis.sha1hex(stream .. '\n' .. ARGV[a + 2] .. '\n' .. ARGV[a + 4] .. '\n' .. ARGV[a + 3])
    local deadline = now + timeout_ms
    local known, listed = {}, false
    if state then
      known, listed = look(req, state, stream, reply)
    end
    asked[replicas] = asked[replicas] or {}
    asked[replicas][#asked[replicas] + 1] = i + 1
    if known.state and known.sha and known.sha ~= sha then
      results[i + 1] = {'conflict', known.entry or ''}
    elseif known.state and repeats(req) > budget then
      results[i + 1] = {'retry_budget_exhausted', known.entry or ''}
    elseif known.state and known.emitted and not listed then
      results[i + 1] = {'stream_gap', known.entry or ''}
    elseif known.state == 'done' then
      tell(req, reply, limits, 'id', id, 'attempt', known.attempt or '0', 'groups', known.emitted or '0',
        'end', known.result)
      results[i + 1] = {'done', known.entry or ''}
    elseif known.state then
      attach(req, stream, reply, known, deadline, timeout_ms)
      results[i + 1] = {'attached', known.entry}
    elseif limit > 0 and redis.call('TYPE', stream).ok == 'stream' and unclaimed(stream) >= limit then
      results[i + 1] = {'queue_full', ''}
    else
      local text = string.format('%.3f', deadline)
      local entry = on_any_type('XADD', stream, '*', 'id', id, 'path', ARGV[a + 2], 'body', ARGV[a + 3],
        'stream', ARGV[a + 4], 'reply', reply, 'deadline_ms', text,
        'accepted_ms', string.format('%.3f', now), 'cost', ARGV[a + 6], 'prompt_tokens', ARGV[a + 7],
        'attempt', '1')
      if entry then
        redis.call('HSET', req, 'state', 'queued', 'reply', reply, 'until', text, 'prio', ARGV[a + 8],
          'stream', stream, 'entry', entry, 'retries', 0, 'deadline_ms', text, 'sha', sha)
        redis.call('PEXPIRE', req, math.ceil(timeout_ms + keep_ms))
        if redis.call('PTTL', stream) < timeout_ms + keep_ms then
          -- Some more than needed, so that not every request has to renew it.
          redis.call('PEXPIRE', stream, math.ceil(timeout_ms + 2 * keep_ms))
        end
        fresh[replicas] = fresh[replicas] or {}
        fresh[replicas][stream] = true
        results[i + 1] = {'accepted', entry}
      else
        results[i + 1] = {'refused', stream .. ' holds another type than a stream'}
      end
    end
  end
end

for replicas, places in pairs(asked) do
  local best, live = least_loaded(replicas, now, nil)
  if fresh[replicas] then
    wake(replicas, prefix, best)
    for stream in pairs(live == 0 and fresh[replicas] or {}) do
      forget_expired(stream)
    end
  end
  for _, place in ipairs(places) do
    results[place][3] = live
  end
end
return results
