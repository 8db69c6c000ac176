-- Cancel a request, or let one of those that wait for it leave. One that waits is removed and answered; one that
-- runs is marked, and its worker told to abort it. A cancelled request is never run again.
--
-- KEYS 1 its hash   2 its stream   3 and more: its reply streams (stream and replies as the hash names them)
-- ARGV 1 prefix   2 request id   3 how long a result is kept, ms   4 life of the reply stream, ms   5 its MAXLEN
--      6 reply stream of the one who leaves; empty: the request is cancelled for all
-- Returns cancelled (it waited; answered now) | aborting (it runs; its worker was told) | left (others wait for it
--   still, or this one never did) | done | unknown | moved (the hash names other keys by now: read it again).
--@include entries
--@include answer

local keys = {req = KEYS[1], stream = KEYS[2], replies = {}}
for i = 3, #KEYS do
  keys.replies[i - 2] = KEYS[i]
end
local known = redis.call('HMGET', keys.req, 'state', 'stream', 'reply', 'entry', 'attempt', 'until')
if not (known[1] and known[4]) then
  return 'unknown'
end
if known[1] == 'done' then
  return 'done'
end
if known[2] ~= keys.stream or known[3] ~= table.concat(keys.replies, ' ') then
  return 'moved'
end
local leaves = ARGV[6] or ''
if leaves ~= '' then
  local untils = words(known[6] or '')
  local others, lives, found, last = {}, {}, false, 0
  for i, key in ipairs(keys.replies) do
    if key == leaves then
      found = true
    else
      others[#others + 1], lives[#lives + 1] = key, untils[i] or '0'
      last = math.max(last, tonumber(untils[i] or '') or 0)
    end
  end
  if not found then
    return 'left'
  end
  if #others > 0 then
    redis.call('HSET', keys.req, 'reply', table.concat(others, ' '), 'until', table.concat(lives, ' '),
      'deadline_ms', string.format('%.3f', last))
    return 'left'
  end
end
local held = redis.pcall('XPENDING', keys.stream, GROUP, known[4], known[4], 1)
if held.err or #held == 0 then
  answer(keys, known[4], ARGV[2], known[5] or '1', cancelled_result(),
    {keep_ms = ARGV[3], reply_ttl_ms = ARGV[4], maxlen = ARGV[5]})
  return 'cancelled'
end
redis.call('HSET', keys.req, 'cancel', 1)
local replica = string.match(held[1][2], '^(.*):[^:]*$') or held[1][2]
redis.call('PUBLISH', ARGV[1] .. 'wake:' .. replica, 'cancel ' .. ARGV[2])
return 'aborting'
