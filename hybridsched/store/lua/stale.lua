-- List claimed requests whose worker has not renewed them for a lease, for reclaim.lua. Changes no request;
-- forgets consumers that hold nothing and have long been silent.
--
-- KEYS 1-3 streams of the model, most urgent first
-- ARGV 1 lease, ms (0: all claimed)   2 most to list in each class   3 silence after which an empty consumer is
--   forgotten, ms
-- Returns a list of {class, entry id, owner, idle_ms, flat fields}.
--@include entries

local found = {}
for class = 1, 3 do
  local stream = KEYS[class]
  local pending = redis.pcall('XPENDING', stream, GROUP, 'IDLE', ARGV[1], '-', '+', ARGV[2])
  if not pending.err then
    for _, row in ipairs(pending) do
      local entry = redis.call('XRANGE', stream, row[1], row[1])[1]
      if entry then
        found[#found + 1] = {class - 1, row[1], row[2], row[3], entry[2]}
      else
        redis.call('XACK', stream, GROUP, row[1])
      end
    end
    for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', stream, GROUP)) do
      if field(consumer, 'pending') == 0 and field(consumer, 'idle') > tonumber(ARGV[3]) then
        redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, field(consumer, 'name'))
      end
    end
  end
end
return found
