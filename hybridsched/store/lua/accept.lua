-- Accept online requests, each id once; a repeat attaches to the first. Several at once cost one call.
--
-- KEYS, four for each request: its hash (req:ID), the stream of its model and priority, its reply stream, the
--   replicas hash of its model.
-- ARGV 1 prefix of the pool's keys ("hs:{POOL}:")   2 how long a hash outlives the deadline, ms
--      3 retry budget (repeats of one id that attach)   4 life of a reply stream after its last entry, ms
--      5 MAXLEN of a reply stream (approximate)
--   then nine for each request: id, path, body, stream (0/1), timeout_ms, cost (tokens), prompt_tokens,
--   priority, most unclaimed requests that may stand in its stream before it (0: no limit).
-- Returns, for each request, {word, entry id}: accepted | attached (runs or waits; its answer comes to this
--   reply stream) | done (the kept result was sent to this reply stream) | retry_budget_exhausted | queue_full.
-- Publishes `wake` to the least loaded live replica of each model.
--@include clock
--@include entries
--@include replicas
--@include answer

local prefix, keep_ms, budget = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local reply_ttl_ms, maxlen = ARGV[4], ARGV[5]
local now = clock_ms()
local results, fresh = {}, {}

for i = 0, #KEYS / 4 - 1 do
  local req, stream, reply, replicas = KEYS[4 * i + 1], KEYS[4 * i + 2], KEYS[4 * i + 3], KEYS[4 * i + 4]
  local a = 5 + 9 * i
  local id, timeout_ms, limit = ARGV[a + 1], tonumber(ARGV[a + 5]), tonumber(ARGV[a + 9])
  local known = redis.call('HMGET', req, 'state', 'entry', 'result', 'attempt')
  if known[1] then
    if redis.call('HINCRBY', req, 'retries', 1) > budget then
      results[i + 1] = {'retry_budget_exhausted', known[2] or ''}
    elseif known[1] == 'done' then
      redis.call('XADD', reply, 'MAXLEN', '~', maxlen, '*', 'id', id, 'attempt', known[4] or '0', 'end', known[3])
      redis.call('PEXPIRE', reply, reply_ttl_ms)
      results[i + 1] = {'done', known[2] or ''}
    else
      redis.call('HSET', req, 'reply', reply)
      results[i + 1] = {'attached', known[2]}
    end
  elseif limit > 0 and unclaimed(stream) >= limit then
    results[i + 1] = {'queue_full', ''}
  else
    local deadline = string.format('%.3f', now + timeout_ms)
    local entry = redis.call('XADD', stream, '*', 'id', id, 'path', ARGV[a + 2], 'body', ARGV[a + 3],
      'stream', ARGV[a + 4], 'reply', reply, 'deadline_ms', deadline,
      'accepted_ms', string.format('%.3f', now), 'cost', ARGV[a + 6], 'prompt_tokens', ARGV[a + 7],
      'attempt', '1')
    redis.call('HSET', req, 'state', 'queued', 'reply', reply, 'prio', ARGV[a + 8], 'stream', stream,
      'entry', entry, 'retries', 0, 'deadline_ms', deadline)
    redis.call('PEXPIRE', req, math.ceil(timeout_ms + keep_ms))
    fresh[replicas] = true
    results[i + 1] = {'accepted', entry}
  end
end

for replicas in pairs(fresh) do
  wake(replicas, prefix, least_loaded(replicas, now, nil))
end
return results
